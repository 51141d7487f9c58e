# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank of every pipeline stage: parameters and state exact, activations by formula.

The peak is at the beginning of a backward, when all activations are kept; layers' temporary tensors
are freed before.
"""

from __future__ import annotations

from functools import cache, partial

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.encoders import Encoder
from examples.mimo.nemotron_vlm.planner import layers
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED, Part
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.parameters import (
    Held,
    chunks_of_stage,
    padded,
    stages_of,
)
from examples.mimo.nemotron_vlm.planner.plan import Plan
from megatron.core.pipeline_parallel.stage_order import order_of_stage

Parts = dict[str, float]
"""Bytes of a rank, by part."""


def memory_of(plan: Plan, machine: Machine) -> list[Parts]:
    """Return the bytes of a rank of each pipeline stage, by part."""
    layouts = plan.layouts
    makes = [partial(_language_stage, stage=stage) for stage in range(layouts.language.pp)]
    if layouts.non_colocated:
        makes = [
            partial(_encoder_stage, encoder=each, lay=own, stage=stage)
            for each, own in plan.encoders
            for stage in range(own.pp)
        ] + makes
    parts = []
    for make, held in zip(makes, stages_of(plan.preset, layouts), strict=True):
        kept = make(plan, machine)
        state = _state(held, layouts, machine.precision)
        parts.append(state | kept | {"reserved": machine.reserved_bytes})
    return parts


def peak(parts: list[Parts]) -> float:
    """Return the bytes of the rank that needs most."""
    return max(sum(part.values()) for part in parts)


def _state(held: Held, layouts: Layouts, precision: int) -> Parts:
    """Return parameters, fp32 gradients, and Adam's shard: moments, and fp32 weights with bf16."""
    lay = layouts.language
    replicas = *(each.dp for each in layouts.encoders), lay.dp * lay.cp, lay.expt_dp
    numbers = sharded = 0.0
    for elements, copies in zip(held.modules, replicas, strict=True):
        size = padded(elements, copies)
        numbers += size
        sharded += size / copies
    return {
        "parameters": precision * numbers,
        "gradients": 4.0 * numbers,
        "optimizer": (12.0 if precision == 2 else 8.0) * sharded,
    }


def _encoder_stage(
    plan: Plan, machine: Machine, encoder: Encoder, lay: Layout, stage: int
) -> Parts:
    in_flight = min(lay.pp + plan.layouts.language.pp - stage, plan.layouts.num_microbatches)
    kept = plan.most_inputs(encoder, lay) * encoder.kept(lay, stage == 0, stage == lay.pp - 1)
    return {"encoder activations": in_flight * machine.precision * kept}


def _language_stage(plan: Plan, machine: Machine, stage: int) -> Parts:
    """Return a language stage's bytes; colocated, encoder activations and bridge included."""
    part, width, number = plan.part(machine), machine.precision, plan.layouts.num_microbatches
    parts = dict(_language_kept(part, plan.recompute, number, width, stage))
    if plan.layouts.non_colocated:
        return parts
    at_once = plan.encoded_and_kept
    kept = min(plan.schedule.recompute or at_once, at_once)
    encoder = bridge = 0.0
    for each, own in plan.encoders:
        encoder += width * plan.most_inputs(each, own, kept) * each.kept(own)
        consumed = at_once * plan.inputs_of_sample(each) * part.samples if stage == 0 else 0.0
        row = part.p.hidden_size * each.usual_rows()
        bridge += width * (plan.most_inputs(each, own, at_once) + 2 * consumed) * row
    if plan.schedule.recompute:  # recomputed when the language model's are freed
        encoder = max(0.0, encoder - sum(parts.values()))
    return parts | {"encoder activations": encoder, "bridge": bridge}


@cache
def _language_kept(part: Part, again: str, number: int, width: int, stage: int) -> Parts:
    lay, chunks = part.lay, chunks_of_stage(part.p.hybrid_layer_pattern, part.lay, stage)
    kinds = set("".join(chunks))
    of_layer = {kind: layers.kept_with_recompute(kind, part, again) for kind in kinds}
    kept = tuple(sum(of_layer[kind] for kind in chunk) for chunk in chunks)
    run_again = kinds & set(RECOMPUTED[again])
    running = [layers.language_layer(kind, part).running for kind in run_again]
    is_last = stage == lay.pp - 1
    return {
        "language activations": width * most_in_flight(stage, lay, number, kept),
        "loss": (4 + width + 4 * part.fused) * layers.head(part).kept * is_last,
        "recomputed layer": width * max(running, default=0.0),
    }


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
