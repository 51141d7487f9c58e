# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step on a machine: its parts, put into the order of the schedule.

The parts are layers with their collectives, the bridge, and what follows the backward. No
communication overlaps with compute, neither the layers' nor the optimizer's, as is the program's
default.
"""

import math
from dataclasses import dataclass
from functools import cache

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.encoders import Encoder
from examples.mimo.nemotron_vlm.planner import layers
from examples.mimo.nemotron_vlm.planner.layers import BACKWARD, RECOMPUTED, Layer, RankBatch
from examples.mimo.nemotron_vlm.planner.machine import (
    Group,
    Machine,
    group_of,
    groups_of,
    replicas_of,
)
from examples.mimo.nemotron_vlm.planner.parameters import chunks_of, held
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import Cost, Work, stages_of_pipeline, timeline

GATHERS = 5
"""Collectives of a layer over TP with sequence parallelism: an all-gather and a reduce-scatter in
the forward; both again in the backward, and one more all-gather for the weights' gradient."""
STEP_REDUCTIONS = 12
"""All-reduces of a single number over all or most ranks in a step of the program: gradient norms,
loss, token count, routers' statistics, and whether all have finite gradients and continue."""


@cache
def language_chunks(batch: RankBatch, again: str, machine: Machine, first: int) -> tuple[Cost, ...]:
    """Return the cost of one microbatch in each virtual stage, in the pipeline's order.

    Args:
        first: the language model's first rank.
    """
    p, lay = batch.p, batch.lay
    groups = groups_of(lay, machine.gpus_per_node, first)
    pattern = p.hybrid_layer_pattern
    of_layer = {kind: _layer(kind, batch, again, machine, groups) for kind in set(pattern) - {"|"}}
    chunks = [
        sum((of_layer[kind].times(chunk.count(kind)) for kind in sorted(set(chunk))), Cost())
        for chunk in chunks_of(pattern, lay)
    ]
    size = batch.tokens * lay.tp * p.hidden_size * machine.precision
    chunks[0] += Cost(tensor=2 * machine.ring(groups["tp"], size))
    loss = (1 + BACKWARD) * machine.seconds(layers.head(batch).work)
    gathered = GATHERS * machine.ring(groups["tp"], size)
    chunks[-1] += Cost(language=machine.with_overhead(loss, "head"), tensor=gathered)
    return tuple(chunks)


def _layer(
    kind: str, batch: RankBatch, again: str, machine: Machine, groups: dict[str, Group]
) -> Cost:
    p, lay = batch.p, batch.lay
    layer = layers.language_layer(kind, batch)
    compute = (1 + BACKWARD) * machine.seconds(layer.work)
    compute = machine.with_overhead(compute, kind, experts=p.num_experts / lay.ep)
    size = batch.tokens * lay.tp * p.hidden_size * machine.precision
    tensor = GATHERS * machine.ring(groups["tp"], size)
    experts = context = 0.0
    if kind == "E":
        sent = size / lay.tp * p.moe_router_topk
        # forward: the router's load, and the number of tokens that each rank receives
        experts = machine.all_reduce(groups["tp"]) + machine.all_reduce(groups["cp"])
        experts += machine.ring(groups["ep"], 0.0) + machine.ring(groups["expt_tp"], 0.0)
        experts += 4 * machine.all_to_all(groups["ep"], sent)
        experts += 4 * machine.ring(groups["expt_tp"], sent * lay.etp)
    elif lay.cp > 1:
        context = 2 * _context(layer, machine, groups["cp"])
    cost = Cost(language=compute, tensor=tensor, experts=experts, context=context)
    if kind in RECOMPUTED[again]:
        cost += Cost(recompute=cost.forward)
    return cost


def _context(layer: Layer, machine: Machine, group: Group) -> float:
    """Return the seconds of CP's collectives in one forward: keys and values, or passed states."""
    if layer.states:  # and a few tokens from the neighbour, for the convolution
        return machine.send(group, 0.0) + machine.ring(group, 4.0 * layer.states)
    return machine.ring(group, layer.gathered * machine.precision) if layer.gathered else 0.0


def encoder_cost(plan: Plan, machine: Machine, encoder: Encoder, lay: Layout) -> Cost:
    """Return the cost of encoding a macro-batch, on the ranks with the most inputs."""
    at_once, count = plan.encoded_at_once, encoder.layers / lay.pp
    inputs = plan.most_inputs(encoder, lay, at_once)
    mean = plan.mean_of(encoder)
    compute = inputs * machine.seconds(mean.work) / (lay.tp * lay.pp)
    group = groups_of(lay, machine.gpus_per_node)["tp"]
    reduced = machine.all_reduce(group, inputs * mean.reduced * machine.precision)
    cost = Cost(machine.with_overhead(compute, "vit", count), tensor=4 * count * reduced)
    if plan.schedule.recompute and not plan.layouts.non_colocated:
        again = math.ceil(at_once / plan.schedule.recompute) - 1
        launches = again * encoder.layers * machine.overhead["vit"]
        cost += Cost(recompute=cost.forward + launches)
    return cost


def bridge_seconds(plan: Plan, machine: Machine) -> float:
    """Return the seconds of the bridges in a step, both ways, on the rank that receives most.

    See docs/reviewer/pipeline.md.
    """
    return sum(_bridge_of(plan, machine, *each) for each in plan.encoders)


def _bridge_of(plan: Plan, machine: Machine, encoder: Encoder, e: Layout) -> float:
    lay, per_node = plan.layouts.language, machine.gpus_per_node
    inputs = plan.layouts.batch.global_size * plan.inputs_of(encoder).mean
    rows = inputs * plan.mean_of(encoder).rows
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
    if lay.pp == 1:
        crossings *= plan.layouts.num_microbatches
    return crossings * machine.latency(leaves) + received / machine.bandwidth(leaves)


def after_backward(plan: Plan, machine: Machine) -> tuple[float, float]:
    """Return the seconds of communication after the backward, and of Adam.

    Communication reduces gradients and gathers weights over replicas, where most is held, and
    includes the `STEP_REDUCTIONS`.
    """
    layouts, per_node = plan.layouts, machine.gpus_per_node
    stages = stages_of_pipeline(layouts)
    most = max((held(plan.preset, layouts, stage, plan.frozen) for stage in stages), key=sum)
    world = group_of(layouts.language_offset + layouts.language.size, 1, 0, per_node)
    reduced, adam = STEP_REDUCTIONS * machine.all_reduce(world), 0.0
    gradient, width = plan.state.gradient, machine.precision
    # Adam reads a gradient twice, reads and writes its state, and writes the parameter.
    in_adam = 2 * gradient + 2 * plan.state.optimizer + width
    for group, numbers in zip(replicas_of(layouts, per_node), most, strict=True):
        reduced += machine.ring(group, gradient * numbers)
        reduced += machine.ring(group, width * numbers)
        adam += in_adam * numbers / group.size + gradient * numbers
    return reduced, adam / machine.optimizer_bandwidth


@dataclass(frozen=True)
class StepTime:
    """Time of a step and of its parts."""

    seconds: float
    parts: dict[str, float]  # of a rank of the busiest pipeline stage; ``bubble`` is waiting


def step_time(plan: Plan, machine: Machine) -> StepTime:
    """Predict one step by simulating the pipeline, microbatch by microbatch."""
    work = work_of(plan, machine)
    gradients, optimizer = after_backward(plan, machine)
    after = gradients + optimizer + machine.step_overhead
    total = max(line[-1][2] for line in timeline(work)) + after
    busiest = max(work.by_stage, key=lambda cost: cost.total).times(work.microbatches)
    parts = vars(busiest + work.encoder.times(work.macro_batches)) | {
        "bridge": bridge_seconds(plan, machine),
        "gradients": gradients,
        "optimizer": optimizer,
        "overhead": machine.step_overhead + work.microbatches * machine.microbatch_overhead,
    }
    parts["bubble"] = max(0.0, total - sum(parts.values()))
    return StepTime(total, parts)


def estimate(plan: Plan, machine: Machine) -> float:
    """Estimate a step's seconds by a formula, for searches.

    The busiest stage runs all microbatches, and waits for the others at the pipeline's ends.
    """
    work, vpp = work_of(plan, machine), plan.layouts.language.vpp
    each = [cost.total + work.overhead for cost in work.by_stage]
    ends = (sum(each) - max(each)) / vpp + 2 * (len(each) - 1) * work.hop
    alone = work.macro_batches * work.encoder.total + work.bridge
    after = sum(after_backward(plan, machine)) + machine.step_overhead
    return work.microbatches * max(each) + ends + alone + after


def work_of(plan: Plan, machine: Machine) -> Work:
    """Return the work of a plan's step, in seconds of a machine."""
    layouts, lay, number = plan.layouts, plan.layouts.language, plan.layouts.num_microbatches
    batch = plan.rank_batch(machine)
    encoders = [encoder_cost(plan, machine, *each) for each in plan.encoders]
    chunks = language_chunks(batch, plan.recompute, machine, layouts.language_offset)
    bridge, stages = bridge_seconds(plan, machine), stages_of_pipeline(layouts)
    size = batch.tokens * plan.preset.language.hidden_size * machine.precision
    hop = machine.send(groups_of(lay, machine.gpus_per_node, layouts.language_offset)["pp"], size)
    shared = {"overhead": machine.microbatch_overhead}
    if layouts.non_colocated:
        both = zip(encoders, layouts.encoders, strict=True)
        chunks = *(cost for cost, own in both for _ in range(own.pp)), *chunks
        return Work(stages, chunks, number, hop=max(hop, bridge / number / 2), **shared)
    encoded = sum(encoders, Cost()), plan.encoded_at_once
    return Work(stages, chunks, number, *encoded, hop, bridge, **shared)
