# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank of every pipeline stage: parameters and state exact, activations by formula.

The peak is at the beginning of a backward, when all activations are kept; layers' temporary tensors
are freed before.
"""

from __future__ import annotations

import math
from functools import cache

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset
from examples.mimo.nemotron_vlm.planner import activations
from examples.mimo.nemotron_vlm.planner.activations import KEPT_FOR_LAYER, Rows
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.parameters import Held, chunks_of_stage, stages_of
from examples.mimo.nemotron_vlm.planner.plan import Plan
from megatron.core.pipeline_parallel.stage_order import order_of_stage

BUCKET_MULTIPLE = 128
"""Megatron pads the end of its gradient buffers to a multiple of this and of the replicas."""

Parts = dict[str, float]
"""Bytes of a rank, by part."""


def memory_of(plan: Plan, machine: Machine) -> list[Parts]:
    """Return the bytes of a rank of each pipeline stage, by part."""
    layouts = plan.layouts
    parts = []
    for stage, held in enumerate(stages_of(plan.preset, layouts)):
        state = _state(held, layouts, machine.precision)
        first = layouts.encoder.pp if layouts.non_colocated else 0
        if stage < first:
            kept = _encoder_stage(plan, machine, stage)
        else:
            kept = _language_stage(plan, machine, stage - first)
        parts.append(state | kept | {"reserved": machine.reserved_bytes})
    return parts


def peak(parts: list[Parts]) -> float:
    """Return the bytes of the rank that needs most."""
    return max(sum(part.values()) for part in parts)


def _state(held: Held, layouts: Layouts, precision: int) -> Parts:
    """Return parameters, fp32 gradients, and Adam's shard: moments, and fp32 weights with bf16."""
    replicas = (
        layouts.encoder.dp,
        layouts.language.dp * layouts.language.cp,
        layouts.language.expt_dp,
    )
    numbers = sharded = 0.0
    for aligned, copies in zip(held.by_replicas, replicas, strict=True):
        size = padded(aligned, copies)
        numbers += size
        sharded += size / copies
    return {
        "parameters": precision * numbers,
        "gradients": 4.0 * numbers,
        "optimizer": (12.0 if precision == 2 else 8.0) * sharded,
    }


def _encoder_stage(plan: Plan, machine: Machine, stage: int) -> Parts:
    lay, stages = plan.layouts.encoder, plan.layouts.encoder.pp + plan.layouts.language.pp
    in_flight = min(stages - stage, plan.layouts.num_microbatches)
    one = plan.most_tiles() * machine.precision
    one *= activations.encoder_tile(plan.preset, lay, stage == 0, stage == lay.pp - 1)
    return {"encoder activations": in_flight * one}


def _language_stage(plan: Plan, machine: Machine, stage: int) -> Parts:
    """Return a language stage's bytes; colocated, encoder activations and bridge included."""
    p, lay, number = plan.preset.language, plan.layouts.language, plan.layouts.num_microbatches
    width, rows = machine.precision, plan.rows(machine)
    parts = dict(_language_kept(p, lay, rows, plan.recompute, number, width, stage))
    if not plan.layouts.non_colocated:
        encoder = width * _encoder_kept(plan)
        if plan.recompute_encoder:  # recomputed when the language model's are freed
            encoder = max(0.0, encoder - sum(parts.values()))
        parts["encoder activations"] = encoder
        parts["bridge"] = width * _bridge_kept(plan, stage)
    return parts


def padded(aligned: int, replicas: int) -> int:
    """Return the elements of a gradient buffer, padding included."""
    multiple = math.lcm(replicas, BUCKET_MULTIPLE)
    return -(-aligned // multiple) * multiple


@cache
def _language_kept(
    p: LanguagePreset, lay: Layout, rows: Rows, again: str, number: int, width: int, stage: int
) -> Parts:
    chunks = chunks_of_stage(p.hybrid_layer_pattern, lay, stage)
    kinds = set("".join(chunks))
    layers = {kind: activations.recomputed_layer(kind, p, lay, rows, again) for kind in kinds}
    kept = tuple(sum(layers[kind] for kind in chunk) for chunk in chunks)
    runs_again = kinds & set(KEPT_FOR_LAYER[again])
    largest = max(
        (activations.running_layer(kind, p, lay, rows) for kind in runs_again), default=0.0
    )
    is_last = stage == lay.pp - 1
    return {
        "language activations": width * most_in_flight(stage, lay, number, kept),
        "loss": (4 + width + 4 * rows.fused) * activations.head(p, lay, rows) * is_last,
        "recomputed layer": width * largest,
    }


def _encoder_kept(plan: Plan) -> float:
    """Return the elements that a colocated encoder keeps, or holds while recomputing."""
    kept = min(plan.recompute_encoder or plan.encoded_and_kept, plan.encoded_and_kept)
    of_tile = activations.encoder_tile(plan.preset, plan.layouts.encoder)
    return plan.most_tiles(kept) * of_tile


def _bridge_kept(plan: Plan, stage: int) -> float:
    """Return the elements of the rows that a rank encodes, and of those that it consumes."""
    kept, micro_size = plan.encoded_and_kept, plan.layouts.batch.micro_size
    row = plan.preset.language.hidden_size * plan.preset.encoder.tokens_per_tile
    consumed = kept * plan.images.mean * micro_size if stage == 0 else 0.0
    return (plan.most_tiles(kept) + 2 * consumed) * row


@cache
def most_in_flight(stage: int, lay: Layout, microbatches: int, kept: tuple[float, ...]) -> float:
    """Return the most elements that a stage keeps at once in Megatron's order of microbatches.

    Args:
        kept: elements that each virtual stage keeps of one microbatch.
    """
    if lay.pp == 1:
        return sum(kept)
    # After the warm-up, whose length does not depend on the microbatches, no more are in flight.
    number = min(microbatches, 4 * lay.pp)
    now = most = 0.0
    for way, chunk, _ in order_of_stage(stage, lay.pp, number, lay.vpp):
        now += kept[chunk] if way == "forward" else -kept[chunk]
        most = max(most, now)
    return most
