# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step on a machine: its parts, put into the order of the schedule.

The parts are layers with their collectives, the bridge, and what follows the backward. No
communication overlaps with compute, neither the layers' nor the optimizer's, as is the program's
default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.encoders import Encoder
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset
from examples.mimo.nemotron_vlm.planner import layers
from examples.mimo.nemotron_vlm.planner.communication import (
    Group,
    all_reduce,
    all_to_all,
    group_of,
    groups_of,
    replicas_of,
    ring,
    send,
)
from examples.mimo.nemotron_vlm.planner.layers import BACKWARD, RECOMPUTED, Layer, Rows
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.parameters import chunks_of, stages_of
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import (
    Cost,
    Work,
    stages_of_pipeline,
    timeline,
)

GATHERS = 5
"""Collectives of a layer over TP with sequence parallelism: an all-gather and a reduce-scatter in
the forward; both again in the backward, and one more all-gather for the weights' gradient."""
ADAM_BYTES = 34
"""Bytes that Adam reads and writes for each parameter of a rank's shard: gradient (fp32, read
twice), weight and two moments (fp32, read and written), and the weight in 16 bits (written)."""
STEP_REDUCTIONS = 12
"""All-reduces of a single number over all or most ranks in a step of the program: gradient norms,
loss, token count, routers' statistics, and whether all have finite gradients and continue."""


def language_chunks(plan: Plan, machine: Machine) -> tuple[Cost, ...]:
    """Return the cost of one microbatch in each virtual stage, in the pipeline's order."""
    p, lay, offset = plan.preset.language, plan.layouts.language, plan.layouts.language_offset
    return _chunks(p, lay, plan.rows(machine), plan.recompute, machine, offset)


@cache
def _chunks(
    p: LanguagePreset, lay: Layout, rows: Rows, again: str, machine: Machine, first: int
) -> tuple[Cost, ...]:
    groups = groups_of(lay, machine.gpus_per_node, first)
    pattern = p.hybrid_layer_pattern
    of_layer = {
        kind: _layer(kind, p, lay, rows, again, machine, groups) for kind in set(pattern) - {"|"}
    }
    chunks = [
        sum((of_layer[kind].times(chunk.count(kind)) for kind in sorted(set(chunk))), Cost())
        for chunk in chunks_of(pattern, lay)
    ]
    size = rows.tokens(lay) * lay.tp * p.hidden_size * machine.precision
    chunks[0] += Cost(tensor=2 * ring(machine, groups["tp"], size))
    loss = (1 + BACKWARD) * machine.seconds(layers.head(p, lay, rows).work)
    gathered = GATHERS * ring(machine, groups["tp"], size)
    chunks[-1] += Cost(language=machine.with_overhead(loss, "head"), tensor=gathered)
    return tuple(chunks)


def _layer(
    kind: str,
    p: LanguagePreset,
    lay: Layout,
    rows: Rows,
    again: str,
    machine: Machine,
    groups: dict[str, Group],
) -> Cost:
    layer = layers.language_layer(kind, p, lay, rows)
    compute = (1 + BACKWARD) * machine.seconds(layer.work)
    compute = machine.with_overhead(compute, kind, experts=p.num_experts / lay.ep)
    size = rows.tokens(lay) * lay.tp * p.hidden_size * machine.precision
    tensor = GATHERS * ring(machine, groups["tp"], size)
    experts = context = 0.0
    if kind == "E":
        sent = size / lay.tp * p.moe_router_topk * rows.imbalance
        # forward: the router's load, and the number of tokens that each rank receives
        experts = all_reduce(machine, groups["tp"]) + all_reduce(machine, groups["cp"])
        experts += ring(machine, groups["ep"], 0.0) + ring(machine, groups["expt_tp"], 0.0)
        experts += 4 * all_to_all(machine, groups["ep"], sent)
        experts += 4 * ring(machine, groups["expt_tp"], sent * lay.etp)
    elif lay.cp > 1:
        context = 2 * _context(layer, machine, groups["cp"])
    cost = Cost(language=compute, tensor=tensor, experts=experts, context=context)
    if kind in RECOMPUTED[again]:
        cost += Cost(recompute=cost.forward)
    return cost


def _context(layer: Layer, machine: Machine, group: Group) -> float:
    """Return the seconds of CP's collectives in one forward: keys and values, or passed states."""
    if layer.states:  # and a few tokens from the neighbour, for the convolution
        return send(machine, group, 0.0) + ring(machine, group, 4.0 * layer.states)
    if not layer.moved:
        return 0.0
    moved = all_to_all(machine, group, layer.moved * machine.precision)
    return moved + ring(machine, group, layer.gathered * machine.precision)


def encoder_cost(plan: Plan, machine: Machine) -> Cost:
    """Return the cost of encoding a macro-batch, on the ranks with the most inputs."""
    return sum((_cost_of(plan, machine, *each) for each in plan.encoders), Cost())


def _cost_of(plan: Plan, machine: Machine, encoder: Encoder, lay: Layout) -> Cost:
    at_once, count = plan.encoded_at_once, encoder.layers / lay.pp
    inputs = plan.most_inputs(encoder, lay, at_once)
    layer = layers.encoder_input(encoder, plan.preset.language.hidden_size, lay)
    compute = inputs * (1 + BACKWARD) * machine.seconds(layer.work)
    group = groups_of(lay, machine.gpus_per_node)["tp"]
    reduced = all_reduce(machine, group, inputs * encoder.reduced() * machine.precision)
    cost = Cost(machine.with_overhead(compute, "vit", count), tensor=4 * count * reduced)
    if plan.recompute_encoder and not plan.layouts.non_colocated:
        again = math.ceil(at_once / plan.recompute_encoder) - 1
        launches = again * encoder.layers * machine.overhead["vit"]
        cost += Cost(recompute=cost.forward + launches)
    return cost


def bridge_seconds(plan: Plan, machine: Machine) -> float:
    """Seconds of the bridges in a step, both ways, on the rank that receives most.

    See docs/reviewer/pipeline.md.
    """
    return sum(_bridge_of(plan, machine, *each) for each in plan.encoders)


def _bridge_of(plan: Plan, machine: Machine, encoder: Encoder, e: Layout) -> float:
    lay, per_node = plan.layouts.language, machine.gpus_per_node
    rows = plan.layouts.batch.global_size * plan.inputs_of_sample(encoder) * encoder.usual_rows()
    size = rows * plan.preset.language.hidden_size * machine.precision
    if plan.layouts.non_colocated:
        leaves = plan.layouts.language_offset + lay.size > per_node
        received = 2 * size / min(e.dp, lay.dp)
    else:
        forward = size * max(0.0, 1 / lay.dp - 1 / e.dp)
        backward = size * (1 / e.dp - min(1 / e.dp, 1 / lay.dp) / lay.cp)
        received = forward + (size / e.dp if lay.pp > 1 else backward)
        leaves = max(lay.tp * lay.cp, e.tp, lay.size if lay.pp > 1 else 1) > per_node
    if not received:
        return 0.0
    crossings = 2
    if lay.pp == 1 or plan.in_bubbles:
        crossings *= plan.layouts.num_microbatches
    return crossings * machine.latency(leaves) + received / machine.bandwidth(leaves)


def after_backward(plan: Plan, machine: Machine) -> tuple[float, float]:
    """Return the seconds of communication after the backward, and of Adam.

    Communication reduces gradients and gathers weights over replicas, where most is held, and
    includes the `STEP_REDUCTIONS`.
    """
    layouts, per_node = plan.layouts, machine.gpus_per_node
    most = max((held.modules for held in stages_of(plan.preset, layouts)), key=sum)
    world = group_of(layouts.language_offset + layouts.language.size, 1, 0, per_node)
    reduced, adam = STEP_REDUCTIONS * all_reduce(machine, world), 0.0
    for group, numbers in zip(replicas_of(layouts, per_node), most, strict=True):
        reduced += ring(machine, group, 4.0 * numbers)
        reduced += ring(machine, group, machine.precision * numbers)
        adam += ADAM_BYTES * numbers / group.size + 4.0 * numbers
    return reduced, adam / machine.optimizer_bandwidth


@dataclass(frozen=True)
class Step:
    """Time of a step and of its parts."""

    seconds: float
    work: float  # seconds that all ranks together are busy
    parts: dict[str, float]  # of a rank of the busiest pipeline stage; ``bubble`` is waiting


def step_time(plan: Plan, machine: Machine) -> Step:
    """Predict one step by simulating the pipeline, microbatch by microbatch."""
    work = work_of(plan, machine)
    gradients, optimizer = after_backward(plan, machine)
    after = gradients + optimizer + machine.step_overhead
    total = max(line[-1][2] for line in timeline(work)) + after
    everyone = _all_work(work, after)
    if machine.shared_cores:
        total = max(total, everyone / machine.shared_cores)
    busiest = max(work.by_stage, key=lambda cost: cost.total).times(work.microbatches)
    parts = vars(busiest + work.encoder.times(work.macro_batches)) | {
        "bridge": bridge_seconds(plan, machine),
        "gradients": gradients,
        "optimizer": optimizer,
        "overhead": machine.step_overhead + work.microbatches * machine.microbatch_overhead,
    }
    parts["bubble"] = max(0.0, total - sum(parts.values()))
    return Step(total, everyone, parts)


def estimate(plan: Plan, machine: Machine) -> float:
    """Estimate a step's seconds by a formula, for searches.

    The busiest stage runs all microbatches, and waits for the others at the pipeline's ends.
    """
    work, vpp = work_of(plan, machine), plan.layouts.language.vpp
    each = [cost.total + work.overhead for cost in work.by_stage]
    ends = (sum(each) - max(each)) / vpp + 2 * (len(each) - 1) * work.hop
    alone = work.macro_batches * work.encoder.total + work.bridge
    around = max(ends, alone) if plan.in_bubbles else ends + alone
    after = sum(after_backward(plan, machine)) + machine.step_overhead
    return work.microbatches * max(each) + around + after


def work_of(plan: Plan, machine: Machine) -> Work:
    """Return the work of a plan's step, in seconds of a machine."""
    layouts, lay, number = plan.layouts, plan.layouts.language, plan.layouts.num_microbatches
    encoder, chunks = encoder_cost(plan, machine), language_chunks(plan, machine)
    bridge, stages = bridge_seconds(plan, machine), stages_of_pipeline(layouts)
    size = plan.rows(machine).tokens(lay) * plan.preset.language.hidden_size * machine.precision
    hop = send(machine, groups_of(lay, machine.gpus_per_node, layouts.language_offset)["pp"], size)
    shared = {"overhead": machine.microbatch_overhead}
    if layouts.non_colocated:
        of_encoders = [(_cost_of(plan, machine, *each),) * each[1].pp for each in plan.encoders]
        chunks = sum((*of_encoders, chunks), ())
        return Work(stages, chunks, number, hop=max(hop, bridge / number / 2), **shared)
    encoded = encoder, plan.encoded_at_once, plan.in_bubbles
    return Work(stages, chunks, number, *encoded, hop, bridge, **shared)


def _all_work(work: Work, after: float) -> float:
    """Return the busy seconds of all ranks together, which shared cores must work whoever waits."""
    alone = work.macro_batches * work.encoder.total + work.bridge + after
    each = [work.microbatches * (cost.total + work.overhead) + alone for cost in work.by_stage]
    last = len(work.chunks) - 1
    for virtual in range(last + 1):  # messages to and from both neighbours, forward and backward
        neighbours = (virtual > 0) + (virtual < last)
        each[virtual % len(each)] += work.microbatches * 2 * neighbours * work.hop
    return sum(stage.ranks * busy for stage, busy in zip(work.stages, each, strict=True))
