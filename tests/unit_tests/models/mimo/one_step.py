# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a tiny VLM, compared with the same step in a reference layout."""

from __future__ import annotations

import functools

from examples.mimo.common.layout import parse_layout
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
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

SAMPLES, MICROBATCH = 16, 8

TOLERANCE = 3e-4 if HAVE_CUDA else 2e-5
"""Relative tolerance of fp32 sums in another order. Found: 5e-6 at most, 1e-6 in the median
parameter; on GPUs, whose kernels multiply in TF32, 1.5e-4."""


def arguments(encoder: str, language: str, microbatch: int = MICROBATCH) -> tuple[str, ...]:
    """Command line of the step; microbatches of the same samples in every layout."""
    samples_per_rank = microbatch // parse_layout(language, "language").dp
    return (
        *("--encoder", encoder, "--language", language, *PROPORTIONAL_STEP),
        *("--global-batch-size", str(SAMPLES), "--micro-batch-size", str(samples_per_rank)),
        *("--seq-length", "16"),
    )


@functools.cache
def reference_step(encoder: str) -> tuple[Weights, Weights]:
    """Weights before and after the step, with the language model laid out as its encoder."""
    with trainer(*arguments(encoder, language=encoder)) as run:
        before = gather_weights(run.stages)
        assert not run.train_step()["skipped"]
        return before, gather_weights(run.stages)


def assert_step_equals_reference(
    encoder: str, language: str, *more: str, microbatch: int = MICROBATCH
) -> None:
    """Take the step; every shard of encoder and language model moves as the reference's.

    Args:
        more: command-line arguments that do not change the result.
        microbatch: samples in a microbatch, over all ranks.
    """
    before, after = reference_step(encoder)
    with trainer(*arguments(encoder, language, microbatch), *more) as run:
        assert_shards_equal(run.stages, before)
        run.train_step()
        assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
