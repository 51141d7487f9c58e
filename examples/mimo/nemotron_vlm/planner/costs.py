# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of the parts of a step: layers with their collectives, the bridge, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import add

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset
from examples.mimo.nemotron_vlm.planner import flops
from examples.mimo.nemotron_vlm.planner.activations import KEPT_FOR_LAYER, Rows
from examples.mimo.nemotron_vlm.planner.communication import (
    Group,
    all_reduce,
    all_to_all,
    groups_of,
    replicas_of,
    ring,
    send,
    world_of,
)
from examples.mimo.nemotron_vlm.planner.flops import BACKWARD
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.parameters import chunks_of, stages_of
from examples.mimo.nemotron_vlm.planner.plan import Plan

GATHERS = 5
"""Collectives of a layer over TP with sequence parallelism: an all-gather and a reduce-scatter in
the forward; both again in the backward, and one more all-gather for the weights' gradient."""
ADAM_BYTES = 34
"""Bytes that the optimizer reads and writes for each parameter of its shard: gradient, weight, two
moments, the weight in the model's precision; and the gradient once more for its norm."""

STEP_REDUCTIONS = 12
"""All-reduces of a single number over all or most ranks in a step of the program: gradient norms,
loss, token count, routers' statistics, and whether all have finite gradients and continue."""


@dataclass(frozen=True)
class Cost:
    """Seconds of forward and backward of one or several microbatches, in part of the model.

    Attributes:
        encoder, language: compute. recompute: recomputed forwards, with their collectives.
        tensor, experts, context: collectives of tensor, expert and context parallelism.
    """

    encoder: float = 0.0
    language: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    experts: float = 0.0
    context: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, vars(self).values(), vars(other).values()))

    def times(self, factor: float) -> Cost:
        """Return the cost multiplied by ``factor``."""
        return Cost(*(factor * seconds for seconds in vars(self).values()))

    @property
    def total(self) -> float:
        """Seconds of all parts together."""
        return sum(vars(self).values())

    @property
    def forward(self) -> float:
        """Seconds of the forward: a third of the compute and half of the collectives."""
        compute = (self.encoder + self.language) / (1 + BACKWARD)
        return compute + (self.tensor + self.experts + self.context) / 2

    @property
    def backward(self) -> float:
        """Seconds of the backward: what the forward leaves of the total, recompute included."""
        return self.total - self.forward


def language_chunks(plan: Plan, machine: Machine, gpus_per_node: int) -> list[Cost]:
    """Return the cost of one microbatch in each virtual stage, in the pipeline's order."""
    p, lay, rows = plan.preset.language, plan.layouts.language, plan.rows(machine)
    offset = plan.layouts.language_offset
    return list(_chunks(p, lay, rows, plan.recompute, _Hashed(machine), gpus_per_node, offset))


class _Hashed:
    """A machine as the key of a cache, compared by identity."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __hash__(self) -> int:
        return id(self.machine)

    def __eq__(self, other: object) -> bool:
        return self.machine is other.machine


@cache
def _chunks(
    p: LanguagePreset,
    lay: Layout,
    rows: Rows,
    again: str,
    hashed: _Hashed,
    per_node: int,
    first: int,
) -> tuple[Cost, ...]:
    machine = hashed.machine
    groups = groups_of(lay, per_node, first)
    layers = {
        kind: _layer(kind, p, lay, rows, again, machine, groups)
        for kind in set(p.hybrid_layer_pattern) - {"|"}
    }
    chunks = [
        sum((layers[kind].times(chunk.count(kind)) for kind in sorted(set(chunk))), Cost())
        for chunk in chunks_of(p.hybrid_layer_pattern, lay)
    ]
    tokens = rows.samples * rows.seq_length / lay.cp
    size = tokens * p.hidden_size * machine.precision
    chunks[0] += Cost(tensor=2 * ring(machine, groups["tp"], size))
    work = flops.head(p, lay, rows.samples, rows.seq_length)
    loss = (1 + BACKWARD) * machine.seconds(work)
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
    work = flops.language_layer(kind, p, lay, rows.samples, rows.seq_length)
    if "experts" in work:
        work["experts"] *= rows.imbalance
    compute = (1 + BACKWARD) * machine.seconds(work)
    compute = machine.with_overhead(compute, kind, experts=p.num_experts / lay.ep)
    tokens = rows.samples * rows.seq_length / lay.cp
    size = tokens * p.hidden_size * machine.precision
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
        context = 2 * _context(kind, p, lay, tokens / lay.tp, rows.samples, machine, groups["cp"])
    cost = Cost(0.0, compute, 0.0, tensor, experts, context)
    if kind in KEPT_FOR_LAYER[again]:
        cost += Cost(recompute=cost.forward)
    return cost


def _context(
    kind: str,
    p: LanguagePreset,
    lay: Layout,
    tokens: float,
    samples: int,
    machine: Machine,
    group: Group,
) -> float:
    """Return the seconds of CP's collectives in one forward: keys and values, or passed states."""
    width = machine.precision
    if kind == "*":
        q, kv = p.num_attention_heads * p.kv_channels, 2 * p.num_query_groups * p.kv_channels
        moved = all_to_all(machine, group, tokens * (2 * q + kv) * width)  # to zigzag, and back
        return moved + ring(machine, group, tokens * lay.cp * kv * width)
    state = p.mamba_num_heads * p.mamba_head_dim * p.mamba_state_dim
    if kind == "G":
        state = p.linear_num_value_heads * p.linear_key_head_dim * p.linear_value_head_dim
    if kind not in "MG":
        return 0.0
    halo = send(machine, group, 0.0)
    return halo + ring(machine, group, 4.0 * samples * state / lay.tp * lay.cp)


def encoder_cost(plan: Plan, machine: Machine, group: Group, microbatches: int = 1) -> Cost:
    """Return the cost of encoding ``microbatches`` at once, on the rank with the most tiles."""
    e, lay = plan.preset.encoder, plan.layouts.encoder
    tiles = plan.most_tiles(microbatches)
    work = flops.encoder_tile(plan.preset, lay)
    compute = tiles * (1 + BACKWARD) * machine.seconds(work)
    layers = e.layers / lay.pp
    compute = machine.with_overhead(compute, "vit", layers)
    tokens = tiles * ((e.tile // e.patch) ** 2 + e.class_tokens)
    reduced = all_reduce(machine, group, tokens * e.hidden * machine.precision)
    return Cost(encoder=compute, tensor=4 * layers * reduced)


def bridge_seconds(plan: Plan, machine: Machine, gpus_per_node: int) -> float:
    """Seconds of the bridge in a step, both ways, on the rank that receives most.

    See docs/reviewer/pipeline.md.
    """
    e, lay, batch = plan.layouts.encoder, plan.layouts.language, plan.layouts.batch
    rows = batch.global_size * plan.images.mean * plan.preset.encoder.tokens_per_tile
    size = rows * plan.preset.language.hidden_size * machine.precision
    if plan.layouts.non_colocated:
        most = size / min(e.dp, lay.dp)
        leaves = plan.layouts.language_offset + lay.size > gpus_per_node
        received = 2 * most
    else:
        forward = size * max(0.0, 1 / lay.dp - 1 / e.dp)
        backward = size * (1 / e.dp - min(1 / e.dp, 1 / lay.dp) / lay.cp)
        received = forward + (size / e.dp if lay.pp > 1 else backward)
        leaves = max(lay.tp * lay.cp, e.tp, lay.size if lay.pp > 1 else 1) > gpus_per_node
    if not received:
        return 0.0
    crossings = 2
    if lay.pp == 1 or plan.in_bubbles:
        crossings *= plan.layouts.num_microbatches
    bandwidth = machine.network_speed if leaves else machine.node_speed
    latency = machine.network_latency if leaves else machine.node_latency
    return crossings * latency + received / bandwidth


def after_backward(plan: Plan, machine: Machine, gpus_per_node: int) -> tuple[float, float]:
    """Return the seconds of communication after the backward, and of Adam.

    Communication reduces gradients and gathers weights over replicas, where most is held, and
    includes the `STEP_REDUCTIONS`.
    """
    groups = replicas_of(plan.layouts, gpus_per_node)
    most = max((held.by_replicas for held in stages_of(plan.preset, plan.layouts)), key=sum)
    reduced = STEP_REDUCTIONS * all_reduce(machine, world_of(plan.layouts, gpus_per_node))
    adam = 0.0
    for group, numbers in zip(groups, most, strict=True):
        reduced += ring(machine, group, 4.0 * numbers)
        reduced += ring(machine, group, machine.precision * numbers)
        adam += ADAM_BYTES * numbers / group.size + 4.0 * numbers
    return reduced, adam / machine.optimizer_bandwidth
