# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank of every pipeline stage: parameters and state exact, activations by formula.

The peak is at the beginning of a backward, when all activations are kept; layers' temporary tensors
are freed before.
"""

from functools import cache

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.planner import layers
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED, RankBatch
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.parameters import chunks_of_stage, held, padded
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import Stage, stages_of_pipeline
from examples.mimo.nemotron_vlm.planner.stage_order import order_of_stage

Memory = dict[str, float]
"""Bytes of a rank, by part."""


def memory_of(plan: Plan, machine: Machine) -> list[Memory]:
    """Return the bytes of a rank of each pipeline stage, by part."""
    parts = []
    for stage in stages_of_pipeline(plan.layouts):
        kept = _encoder_stage if stage.module == "encoder" else _language_stage
        state = _state(plan, stage, machine.precision)
        parts.append(state | kept(plan, machine, stage) | {"reserved": machine.reserved_bytes})
    return parts


def peak(parts: list[Memory]) -> float:
    """Return the bytes of the rank that needs most."""
    return max(sum(part.values()) for part in parts)


def _state(plan: Plan, stage: Stage, precision: int) -> Memory:
    """Return the bytes of parameters, and of trained ones' gradients and optimizer's shard."""
    layouts, lay = plan.layouts, plan.layouts.language
    replicas = *(each.dp for each in layouts.encoders), lay.dp * lay.cp, lay.expt_dp
    whole = held(plan.preset, layouts, stage)
    trained = held(plan.preset, layouts, stage, plan.frozen)
    numbers = [padded(*each) for each in zip(trained, replicas, strict=True)]
    shards = (number / copies for number, copies in zip(numbers, replicas, strict=True))
    return {
        "parameters": precision * sum(map(padded, whole, replicas)),
        "gradients": plan.state.gradient * sum(numbers),
        "optimizer": plan.state.optimizer * sum(shards),
    }


def _encoder_stage(plan: Plan, machine: Machine, stage: Stage) -> Memory:
    (encoder, lay), n = plan.encoders[stage.encoder], stage.number
    in_flight = min(lay.pp + plan.layouts.language.pp - n, plan.layouts.num_microbatches)
    kept = plan.most_inputs(encoder, lay) * plan.kept_of(encoder, lay, n == 0, n == lay.pp - 1)
    return {"encoder activations": in_flight * machine.precision * kept}


def _language_stage(plan: Plan, machine: Machine, stage: Stage) -> Memory:
    """Return a language stage's bytes; colocated, encoder activations and bridge included."""
    batch, width = plan.rank_batch(machine), machine.precision
    number = plan.layouts.num_microbatches
    logit = plan.state.logit or 4 + width + 4 * batch.fused
    parts = dict(_language_kept(batch, plan.recompute, number, width, logit, stage.number))
    if plan.layouts.non_colocated:
        return parts
    at_once = plan.encoded_at_once
    kept = min(plan.schedule.recompute or at_once, at_once)
    encoder, bridge, is_first = 0.0, 0.0, stage.number == 0
    for each, own in plan.encoders:
        encoder += width * plan.most_inputs(each, own, kept) * plan.kept_of(each, own)
        consumed = at_once * plan.inputs_of(each).mean * batch.samples * is_first
        row = batch.p.hidden_size * plan.mean_of(each).rows
        bridge += width * (plan.most_inputs(each, own, at_once) + 2 * consumed) * row
    if plan.schedule.recompute:  # recomputed when the language model's are freed
        encoder = max(0.0, encoder - sum(parts.values()))
    return parts | {"encoder activations": encoder, "bridge": bridge}


@cache
def _language_kept(
    batch: RankBatch, again: str, number: int, width: int, logit: float, stage: int
) -> Memory:
    lay, chunks = batch.lay, chunks_of_stage(batch.p.hybrid_layer_pattern, batch.lay, stage)
    kinds = set("".join(chunks))
    of_layer = {kind: layers.kept_with_recompute(kind, batch, again) for kind in kinds}
    kept = tuple(sum(of_layer[kind] for kind in chunk) for chunk in chunks)
    run_again = kinds & set(RECOMPUTED[again])
    running = [layers.language_layer(kind, batch).running for kind in run_again]
    is_last = stage == lay.pp - 1
    return {
        "language activations": width * most_in_flight(stage, lay, number, kept),
        "loss": logit * layers.head(batch).kept * is_last,
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
