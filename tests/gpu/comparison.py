# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of the training program, and say how far they may differ."""

from __future__ import annotations

import math
from itertools import combinations

from tests.gpu.rows import MODELS, Model, Row
from tests.unit_tests.examples.nemotron_vlm.runs import (
    SAMPLES,
    STEPS,
    TOLERANCE,
    apart,
    one_rank_trajectory,
    trajectory,
)

FIGURES = ("loss", "grad_norm")

MOST = 1e-2
"""The largest tolerance of a 16-bit run, relative."""

SAMPLES_IN_16_BITS = 4 * SAMPLES
"""Samples of a step: the more, the less a token matters that rounding sends to another expert."""

PACKED_ROWS = 8
"""Rows of a global batch of packed samples."""

MICROBATCHES = (2, 1, 4)
"""Microbatches per step of the one-GPU runs whose spread bounds 16-bit runs; the first is the
reference."""


def batch(model: Model, microbatches: int, dp: int) -> tuple[str, ...]:
    """Options for a step's batch in so many microbatches, which are of one row if packed."""
    if model.packed:
        samples, micro_size = PACKED_ROWS, 1
    else:
        samples = SAMPLES_IN_16_BITS if model.is_16_bit else SAMPLES
        micro_size = samples // microbatches // dp
    return ("--global-batch-size", str(samples), "--micro-batch-size", str(micro_size))


def on_one_gpu(model: Model) -> list[dict]:
    """Return the records of the reference run."""
    return _one_gpu(model, *batch(model, MICROBATCHES[0], 1))


def _one_gpu(model: Model, *options: str) -> list[dict]:
    return one_rank_trajectory(*model.options, *options, source=model.source)


def differences(records: list[dict], reference: list[dict]) -> list[dict[str, float]]:
    """Return how far losses and gradient norms lie apart in each step that is not skipped."""
    pairs = zip(records, reference, strict=True)
    return [apart([one], [other]) for one, other in pairs if not other["skipped"]]


def difference(model: Model, records: list[dict], reference: list[dict]) -> dict[str, float]:
    """Return how far two runs lie apart: in fp32 the largest relative difference of a step, in 16
    bits the root mean square over the steps."""
    steps = differences(records, reference)
    if not model.is_16_bit:
        return {name: max(step[name] for step in steps) for name in FIGURES}
    return {name: math.hypot(*(s[name] for s in steps)) / len(steps) ** 0.5 for name in FIGURES}


def tolerance(model: Model) -> dict[str, float]:
    """Return the tolerance of each figure: 1e-4 in fp32; in 16 bits twice the largest difference
    of a step between any two of three one-GPU runs, at most 1 %.

    The forward of these runs rounds alike, so that they part by single tokens' experts; layouts
    also round partial sums.
    """
    if not model.is_16_bit:
        return dict.fromkeys(FIGURES, TOLERANCE)
    if model.packed:  # a microbatch is one row: images of several are encoded at once instead
        others = [("--encoder-macro-batch", str(count)) for count in (1, 4)]
        runs = [_one_gpu(model, *batch(model, 1, 1), *other) for other in others]
    else:
        runs = [_one_gpu(model, *batch(model, count, 1)) for count in MICROBATCHES[1:]]
    pairs = combinations([on_one_gpu(model), *runs], 2)
    steps = [step for one, other in pairs for step in differences(one, other)]
    return {name: min(2 * max(step[name] for step in steps), MOST) for name in FIGURES}


def compare(row: Row) -> dict[str, object]:
    """Run a row on this world's ranks, and compare it with the run on one GPU.

    Returns:
        Found and allowed differences by name of the figure; `skipped` counts skipped steps.
    """
    model, reference = MODELS[row.model], on_one_gpu(MODELS[row.model])
    dp = _dp(row)
    layouts = ("--encoder", row.encoder, "--language", row.language)
    options = (*model.options, *batch(model, row.microbatches, dp), *row.options)
    records = trajectory(*layouts, *options, steps=STEPS, source=model.source)
    skipped = [record["skipped"] for record in records]
    assert skipped == [record["skipped"] for record in reference]
    assert [r["num_tokens"] for r in records] == [r["num_tokens"] for r in reference]
    found, allowed = difference(model, records, reference), tolerance(model)
    return {"found": found, "allowed": allowed, "skipped": sum(skipped)}


def _dp(row: Row) -> int:
    return math.prod(int(part[3:]) for part in row.language.split(",") if part.startswith("dp="))
