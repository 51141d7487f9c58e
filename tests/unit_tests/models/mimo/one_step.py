# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of the program's tiny model, compared with the same step in another layout."""

import functools

import pytest

from examples.mimo.common.layout import parse_layout
from tests.unit_tests.examples.nemotron_vlm.loop.rows import Row
from tests.unit_tests.examples.nemotron_vlm.runs import FOUR_LAYERS, groups, trainer
from tests.unit_tests.models.mimo.weights import (
    Weights,
    assert_shards_equal,
    assert_shards_moved_alike,
    gather_weights,
)
from tests.unit_tests.test_utilities import HAVE_CUDA

PROPORTIONAL_STEP = (
    *("--train-iters", "1", "--lr", "1e6", "--adam-eps", "100"),
    *("--clip-grad", "0", "--weight-decay", "0"),
)
"""Adam's first step with an epsilon far above all gradients: weights move by 10⁴ × gradient, to 1%,
far above their own rounding. So a gradient of the wrong size shows, which Adam and clipping would
otherwise hide."""

SAMPLES = 16

TOLERANCE = 3e-4 if HAVE_CUDA else 2e-5
"""Relative tolerance of fp32 sums in another order. Found: 5e-6 at most, 1e-6 in the median
parameter; on GPUs, whose kernels multiply in TF32, 1.5e-4."""


def arguments(encoder: str, language: str, *options: str, microbatches: int = 2) -> tuple[str, ...]:
    """Command line of the step."""
    micro_size = SAMPLES // microbatches // parse_layout(language, "language").dp
    return (
        *("--encoder", encoder, "--language", language, *PROPORTIONAL_STEP, "--seq-length", "16"),
        *FOUR_LAYERS,
        *("--global-batch-size", str(SAMPLES), "--micro-batch-size", str(micro_size), *options),
    )


@functools.cache
def _step(encoder: str, language: str, *common: str) -> tuple[Weights, Weights, float]:
    """Weights before and after a step, and its loss."""
    with trainer(*arguments(encoder, language, *common)) as run:
        before = gather_weights(run.stages)
        record = run.train_step()
        assert not record["skipped"]
        return before, gather_weights(run.stages), record["loss"]


def check_weights(row: Row) -> None:
    """Take the step: it makes no group, and every shard of either module moves as the reference's.

    There the language model is laid out as the row's encoder, with the same DP, cp=1 and pp=1.
    """
    before, after, loss = _step(row.encoder, row.encoder, *row.common)
    options, count = (*row.common, *row.options), row.microbatches or 2
    line = arguments(row.encoder, row.language, *options, microbatches=count)
    with trainer(*line) as run:
        assert_shards_equal(run.stages, before)
        made = groups()
        assert run.train_step()["loss"] == pytest.approx(loss, rel=1e-6)
        assert groups() == made
        assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
