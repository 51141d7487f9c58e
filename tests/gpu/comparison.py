# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of the training program, and say how far they may differ."""

from __future__ import annotations

import math

from tests.gpu.rows import MODELS, Model, Row
from tests.unit_tests.examples.nemotron_vlm.runs import (
    SAMPLES,
    STEPS,
    TOLERANCE,
    apart,
    one_rank_trajectory,
    trajectory,
)

MOST = 1e-2
"""The largest tolerance of a 16-bit run, relative."""

STEPS_OF_16_BITS = 5
"""Steps that are compared: rounding grows by the step, and a token that goes to another expert
moves a single step by up to 1 %."""

PACKED_ROWS = 8
"""Rows of a global batch of packed samples."""

MICROBATCHES = (2, 1, 4)
"""Microbatches per step of the one-GPU runs whose spread bounds 16-bit runs; the first is the
reference."""


def batch(model: Model, microbatches: int, dp: int) -> tuple[str, ...]:
    """Options for a step's batch in so many microbatches, which are of one row if packed."""
    samples, micro_size = SAMPLES, SAMPLES // microbatches // dp
    if model.packed:
        samples, micro_size = PACKED_ROWS, 1
    return ("--global-batch-size", str(samples), "--micro-batch-size", str(micro_size))


def on_one_gpu(model: Model) -> list[dict]:
    """Return the records of the reference run."""
    return _one_gpu(model, *batch(model, MICROBATCHES[0], 1))


def _one_gpu(model: Model, *options: str) -> list[dict]:
    return one_rank_trajectory(*model.options, *options, source=model.source)


def difference(model: Model, records: list[dict], reference: list[dict]) -> dict[str, float]:
    """Return how far losses and gradient norms lie apart: the largest relative difference of a
    step in fp32, the root mean square over the steps in 16 bits."""
    if not model.is_16_bit:
        return apart(records, reference)
    pairs = [pair for pair in zip(records, reference, strict=True) if not pair[1]["skipped"]]
    steps = [apart([one], [other]) for one, other in pairs[:STEPS_OF_16_BITS]]
    return {name: math.hypot(*(s[name] for s in steps)) / len(steps) ** 0.5 for name in steps[0]}


def tolerance(model: Model) -> dict[str, float]:
    """Return the tolerance of each figure: 1e-4 in fp32, else twice the spread of one-GPU runs, at
    most 1 %."""
    if not model.is_16_bit:
        return {"loss": TOLERANCE, "grad_norm": TOLERANCE}
    reference = on_one_gpu(model)
    if model.packed:  # a microbatch is one row: images of several are encoded at once instead
        others = [("--encoder-macro-batch", str(count)) for count in (1, 4)]
        runs = [_one_gpu(model, *batch(model, 1, 1), *other) for other in others]
    else:
        runs = [_one_gpu(model, *batch(model, count, 1)) for count in MICROBATCHES[1:]]
    spread = {"loss": 0.0, "grad_norm": 0.0}
    for one in (reference, *runs):
        for other in runs:
            for name, value in difference(model, one, other).items():
                spread[name] = max(spread[name], value)
    return {name: min(2 * value, MOST) for name, value in spread.items()}


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
