# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step, by one formula.

The busiest stage runs all microbatches, and waits for one microbatch of each other stage:
microbatches × busiest + (all stages − busiest) / vpp + encoders + optimizer.
Nothing overlaps, as is the program's default, but a host launches ahead of its device: the time of
both is their hypotenuse, between their maximum and their sum. Ranks are balanced, so rows count in
the mean.
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np

from examples.mimo.common.layout import Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED, language_layer, tokens_of
from examples.mimo.nemotron_vlm.planner.machine import Machine, groups_of
from examples.mimo.nemotron_vlm.planner.parameters import chunks_of, held
from examples.mimo.nemotron_vlm.planner.plan import Inputs, Plan, Task, stages_of_pipeline

PASSES = 3.0
"""Work of forward and backward, in forwards; frozen weights have no gradient, which is one."""
GATHERS = 5
"""Collectives of a layer over TP with sequence parallelism: an all-gather and a reduce-scatter in
the forward; both again in the backward, and one more all-gather for the weights' gradient."""
TILE = 128
"""Rows that a product computes at once: the last rows of an expert fill half of them."""
ADAPTED = 12
"""An adapter reads or writes its layer's inputs six times, and its outputs six times. A layer of
two products has as many outputs as inputs."""
COSTS = ("compute", "communication", "recompute")
"""Parts of an array of costs: seconds of forward and backward, of both ways of collectives, and of
forwards that run again."""


def seconds(plan: Plan) -> float:
    """Predict the time of a step."""
    return sum(step_time(plan).values())


@cache
def step_time(plan: Plan) -> dict[str, float]:
    """Predict a step's seconds by part, on a rank of the busiest stage; ``bubble`` is waiting."""
    layouts, machine, stages, alone = plan.layouts, plan.task.machine, [], np.zeros(len(COSTS))
    number, lay = layouts.num_microbatches, layouts.language
    for inputs, own in plan.encoders:
        cost = encoder_cost(plan, inputs, own)
        if layouts.non_colocated:
            stages += [cost] * own.pp
        else:
            alone = alone + number / plan.encoded_at_once * cost
    chunks = language_chunks(plan.task, lay, layouts.batch, layouts.offsets[-1], plan.recompute)
    stages += [sum(chunks[stage :: lay.pp]) for stage in range(lay.pp)]
    costs = np.stack(stages) + [machine.microbatch_overhead, 0.0, 0.0]
    busiest = costs[costs.sum(1).argmax()]
    parts = dict(zip(COSTS, (number * busiest + alone).tolist(), strict=True))
    parts["bubble"] = float(costs.sum() - busiest.sum()) / lay.vpp
    parts["gradients"], parts["optimizer"] = after_backward(plan.task, replace(layouts, batch=None))
    return parts


@cache
def language_chunks(
    task: Task, lay: Layout, batch: Batch, first: int, recompute: str
) -> list[np.ndarray]:
    """Return the costs of one microbatch in each virtual stage, in the pipeline's order.

    Args:
        first: the language model's first rank.
    """
    p, machine = task.preset.language, task.machine
    passes = PASSES - (LANGUAGE in task.options.parts.frozen)
    groups = groups_of(lay, machine.gpus_per_node, first)
    tokens, of_layer = tokens_of(lay, batch), {}
    size = tokens * p.hidden_size * machine.precision
    gather = machine.gather(groups["tp"], size * lay.tp)
    adapters = task.options.adapters
    is_adapted = adapters is not None and LANGUAGE in adapters.parts
    captured = ""  # kinds of layers that CUDA graphs launch as a whole
    if task.options.args.cuda_graph_impl == "local":
        # Elsewhere the host asks for the experts' counts. Colocated, the first rank is 0.
        is_near = lay.ep <= 2 and lay.etp == 1 and not first and recompute == "none"
        captured = "MGE" if is_near else "MG"
    for kind in set(p.hybrid_layer_pattern) - {"|"}:
        layer = language_layer(kind, p, lay, batch)
        work = layer.work.copy()
        if kind == "*":
            work["attention"] *= task.squares / batch.seq_length**2
        if kind == "E":
            work["experts"] *= 1 + TILE / 2 * p.num_experts / lay.ep / (tokens * p.moe_router_topk)
        compute = passes * machine.seconds(work)
        if is_adapted:
            moved = ADAPTED * layer.for_weights * machine.precision
            compute += moved / machine.memory_bandwidth
        launches, exchanged = machine.overhead[kind], 0.0
        if kind == "E":
            launches += p.num_experts / lay.ep * machine.overhead["expert"]
            sent = size * p.moe_router_topk
            exchanged = 2 * machine.all_to_all(groups["ep"], sent)
            exchanged += 2 * machine.gather(groups["expt_tp"], sent * lay.etp)
        if kind not in captured:
            compute = math.hypot(compute, launches)
        both_ways = GATHERS * gather + 2 * exchanged
        again = (compute / passes + both_ways / 2) * (kind in RECOMPUTED[recompute])
        of_layer[kind] = np.array([compute, both_ways, again])
    chunks = [sum(of_layer[k] for k in chunk) for chunk in chunks_of(p.hybrid_layer_pattern, lay)]
    logits = passes * machine.seconds({"gemm": 2 * tokens * p.hidden_size * p.vocab_size})
    chunks[0] = chunks[0] + [0.0, 2 * gather, 0.0]
    chunks[-1] = chunks[-1] + [math.hypot(logits, machine.overhead["head"]), GATHERS * gather, 0.0]
    return chunks


def encoder_cost(plan: Plan, inputs: Inputs, lay: Layout) -> np.ndarray:
    """Return the costs of encoding a macro-batch on a rank of a stage."""
    machine, layers, at_once = plan.task.machine, inputs.encoder.layers, plan.encoded_at_once
    width, again = plan.task.preset.language.hidden_size, 0.0
    each = _of_each(inputs, machine, width)
    work, summed = (inputs.mean(values, at_once * plan.rows(lay)) for values in each)
    is_inert = (inputs.encoder.name, "encoder") in plan.task.inert
    passes = 1.0 if is_inert else PASSES  # the projector's work is little
    work *= passes / PASSES
    launches = layers * machine.overhead["vit"] * passes / PASSES
    compute = math.hypot(work / (lay.tp * lay.pp), launches / lay.pp)
    group = groups_of(lay, machine.gpus_per_node)["tp"]
    sent = 8 * layers / lay.pp * machine.gather(group, summed * machine.precision)
    if plan.schedule.recompute and not plan.layouts.non_colocated:
        launched = math.ceil(at_once / plan.schedule.recompute) - 1
        again = compute / passes + sent / 2 + launched * launches
    return np.array([compute, sent, again])


@cache
def _of_each(inputs: Inputs, machine: Machine, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds that each input takes, and its elements that TP ranks sum."""
    work = inputs.encoder.work(inputs.sizes, width)
    return machine.seconds(work), inputs.encoder.reduced(inputs.sizes)


@cache
def after_backward(task: Task, layouts: Layouts) -> tuple[float, float]:
    """Return the seconds of communication after the backward, and of Adam; the batch is no matter.

    Communication reduces gradients and gathers weights over replicas, where most is held.
    """
    machine, stages = task.machine, stages_of_pipeline(layouts)
    most = max((held(task, layouts, stage, trained=True) for stage in stages), key=sum)
    firsts = zip(layouts.modules, layouts.offsets, strict=True)
    groups = [groups_of(lay, machine.gpus_per_node, first) for lay, first in firsts]
    replicas = [*(each["dp_cp"] for each in groups), groups[-1]["expt_dp"]]
    gradient, width, sent, adam = task.state.gradient, machine.precision, 0.0, 0.0
    copied = 0.0  # each way at the same time
    # Adam reads a gradient twice, reads and writes its state, and writes the parameter.
    in_adam = 2 * gradient + 2 * task.state.optimizer + width
    for group, numbers in zip(replicas, most, strict=True):
        sent += machine.gather(group, (gradient + width) * numbers)
        adam += in_adam * numbers / group.size + gradient * numbers
        copied += task.state.on_host * numbers / group.size
    on_gpu = adam / machine.memory_bandwidth + machine.step_overhead
    return sent, on_gpu + copied / machine.host_bandwidth
