# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of the program's tiny model, compared with the same step in another layout."""

import functools
from dataclasses import replace

import pytest

from tests.unit_tests.examples.nemotron_vlm.loop.rows import Row
from tests.unit_tests.examples.nemotron_vlm.runs import groups, trainer
from tests.unit_tests.models.mimo.weights import (
    Weights,
    assert_shards_equal,
    assert_shards_moved_alike,
    gather_weights,
)
from tests.unit_tests.test_utilities import HAVE_CUDA

TOLERANCE = 3e-4 if HAVE_CUDA else 2e-5
"""Relative tolerance of fp32 sums in another order. Found: 5e-6 at most, 1e-6 in the median
parameter; on GPUs, whose kernels multiply in TF32, 1.5e-4."""


@functools.cache
def _step(line: tuple[str, ...]) -> tuple[Weights, Weights, float]:
    """Weights before and after a step, and its loss."""
    with trainer(*line) as run:
        before = gather_weights(run.stages)
        record = run.train_step()
        assert not record["skipped"]
        return before, gather_weights(run.stages), record["loss"]


def check_weights(row: Row) -> None:
    """Take the step: it makes no group, and every shard of either module moves as the reference's.

    There the language model is laid out as the row's encoder, with the same DP, cp=1 and pp=1.
    """
    reference = replace(row, language=row.encoder, options=(), microbatches=2)
    before, after, loss = _step(reference.commands[0])
    with trainer(*row.commands[0]) as run:
        assert_shards_equal(run.stages, before)
        made = groups()
        assert run.train_step()["loss"] == pytest.approx(loss, rel=1e-6)
        assert groups() == made
        assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
