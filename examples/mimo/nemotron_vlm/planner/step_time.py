# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step, from the costs of its parts in the order of the runtime's schedule.

Colocated modules without a pipeline run encoder, bridge and language model of each macro-batch one
after another; with a pipeline, the encoder runs in three phases or in the bubbles, as training
plans it with these costs (docs/reviewer/pipeline.md). Non-colocated modules form one pipeline.
No communication overlaps with compute, neither the layers' nor the optimizer's, as is the program's
default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from examples.mimo.nemotron_vlm.planner.communication import groups_of, send
from examples.mimo.nemotron_vlm.planner.costs import (
    Cost,
    after_backward,
    bridge_seconds,
    encoder_cost,
    language_chunks,
)
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import Encoders, Span, simulate
from megatron.core.models.mimo.schedule.bubble_plan import ENCODE, Costs, bubble_plan


@dataclass(frozen=True)
class Step:
    """Time of a step and of its parts.

    Attributes:
        seconds: time of the step.
        work: seconds that all ranks together are busy.
        parts: seconds of a rank of the busiest pipeline stage, by part; ``bubble`` is waiting.
        stages: names of the pipeline's stages. spans: timeline of each.
    """

    seconds: float
    work: float
    parts: dict[str, float]
    stages: list[str]
    spans: list[list[Span]]


@dataclass(frozen=True)
class _Work:
    """Costs of what the ranks do in a step.

    Attributes:
        chunks: cost of a microbatch by virtual stage of the pipeline. modules: module of each
            stage.
        hop: seconds from a stage to the next one.
        encoder: cost of a macro-batch, if not a stage of the pipeline. macro_batches: their number.
        bridge: seconds of the bridge in a step outside of the pipeline.
    """

    chunks: list[Cost]
    modules: list[str]
    hop: float
    encoder: Cost
    macro_batches: float
    bridge: float

    @property
    def stages(self) -> list[Cost]:
        """Cost of a microbatch by stage, summed over its virtual stages."""
        size = len(self.modules)
        return [sum(self.chunks[stage::size], Cost()) for stage in range(size)]


def step_time(plan: Plan, machine: Machine, gpus_per_node: int) -> Step:
    """Predict one step by simulating the pipeline, microbatch by microbatch."""
    layouts, number = plan.layouts, plan.layouts.num_microbatches
    work = _work(plan, machine, gpus_per_node)
    spans = _pipeline(plan, work, machine.microbatch_overhead)
    length = max(line[-1][2] for line in spans)
    alone = work.encoder.times(work.macro_batches)
    outside = 0.0 if plan.in_bubbles else alone.total + work.bridge
    if not (layouts.non_colocated or plan.in_bubbles):
        wrap = _macro_batches if layouts.language.pp == 1 else _phases
        spans = [wrap(line, work, plan.encoded_at_once) for line in spans]
    gradients, optimizer = after_backward(plan, machine, gpus_per_node)
    after = {
        "gradients": gradients,
        "optimizer": optimizer,
        "overhead": machine.step_overhead + number * machine.microbatch_overhead,
    }
    total = length + outside + gradients + optimizer + machine.step_overhead
    everyone = _all_work(plan, work, gradients + optimizer + machine.step_overhead, machine)
    if machine.shared_cores:
        total = max(total, everyone / machine.shared_cores)
    busiest = max(work.stages, key=lambda cost: cost.total).times(number) + alone
    bridge = bridge_seconds(plan, machine, gpus_per_node)
    parts = vars(busiest) | {"bridge": bridge} | after
    parts["bubble"] = max(0.0, total - sum(parts.values()))
    return Step(total, everyone, parts, names_of_stages(plan), spans)


def estimate(plan: Plan, machine: Machine, gpus_per_node: int) -> float:
    """Estimate a step's seconds by a formula, for searches.

    The busiest stage runs all microbatches, and waits for the others at the pipeline's ends.
    """
    number, vpp = plan.layouts.num_microbatches, plan.layouts.language.vpp
    work = _work(plan, machine, gpus_per_node)
    each = [cost.total + machine.microbatch_overhead for cost in work.stages]
    ends = (sum(each) - max(each)) / vpp + 2 * (len(each) - 1) * work.hop
    after = sum(after_backward(plan, machine, gpus_per_node)) + machine.step_overhead
    alone = work.macro_batches * work.encoder.total + work.bridge
    around = max(ends, alone) if plan.in_bubbles else ends + alone
    return number * max(each) + around + after


def names_of_stages(plan: Plan) -> list[str]:
    """Return the names of the pipeline's stages; those of a separate encoder come first."""
    layouts = plan.layouts
    names = [f"stage {stage}" for stage in range(layouts.language.pp)]
    if layouts.non_colocated:
        return [f"encoder {stage}" for stage in range(layouts.encoder.pp)] + names
    return names if layouts.language.pp > 1 else ["all ranks"]


def _work(plan: Plan, machine: Machine, gpus_per_node: int) -> _Work:
    layouts, lay = plan.layouts, plan.layouts.language
    groups = groups_of(layouts.encoder, gpus_per_node)
    at_once = plan.encoded_at_once
    encoder = encoder_cost(plan, machine, groups["tp"], at_once)
    bridge = bridge_seconds(plan, machine, gpus_per_node)
    chunks = language_chunks(plan, machine, gpus_per_node)
    modules = ["language"] * lay.pp
    rows = plan.rows(machine)
    size = rows.samples * rows.seq_length / lay.cp / lay.tp * plan.preset.language.hidden_size
    pipeline = groups_of(lay, gpus_per_node, layouts.language_offset)["pp"]
    hop = send(machine, pipeline, size * machine.precision)
    if layouts.non_colocated:
        modules = ["encoder"] * layouts.encoder.pp + modules
        hop = max(hop, bridge / layouts.num_microbatches / 2)
        chunks = [encoder] * layouts.encoder.pp + chunks
        return _Work(chunks, modules, hop, Cost(), 0.0, 0.0)
    if plan.recompute_encoder:
        shares = math.ceil(at_once / plan.recompute_encoder)
        layers = plan.preset.encoder.layers * machine.overhead["vit"]
        encoder += Cost(recompute=encoder.forward + (shares - 1) * layers)
    return _Work(chunks, modules, hop, encoder, layouts.num_microbatches / at_once, bridge)


def _pipeline(plan: Plan, work: _Work, overhead: float) -> list[list[Span]]:
    """Simulate all microbatches in the pipeline, which may have one stage; return the spans."""
    vpp, number = plan.layouts.language.vpp, plan.layouts.num_microbatches

    def seconds(way: str, virtual: int) -> float:
        return getattr(work.chunks[virtual], way) + overhead / 2 / vpp

    encoders = _encoders(plan, work) if plan.in_bubbles else None
    return simulate(work.modules, seconds, number, vpp, work.hop, encoders)


def _encoders(plan: Plan, work: _Work) -> Encoders:
    """Return the encoder's work in the bubbles; its pieces include the time of the bridge."""
    lay, number, size = plan.layouts.language, plan.layouts.num_microbatches, plan.macro_batch
    language = sum(cost.total for cost in work.chunks) / lay.pp * number
    encoder = work.macro_batches * work.encoder.total
    costs = Costs.of_share(encoder / (encoder + language), lay.vpp)

    def seconds(kind: str, macro_batch: int) -> float:
        part = min(size, number - macro_batch * size) / size
        way = "forward" if kind == ENCODE else "backward"
        return part * (getattr(work.encoder, way) + work.bridge / 2 / work.macro_batches)

    return Encoders(bubble_plan(lay.pp, number, size, lay.vpp, costs=costs).before, size, seconds)


def _phases(line: list[Span], work: _Work, _: int) -> list[Span]:
    """Put the encoder's forward before a stage's spans of the pipeline, its backward after."""
    begin = work.encoder.forward + work.bridge / 2
    moved = [(phase, begin + start, begin + stop) for phase, start, stop in line]
    end = moved[-1][2] + work.bridge / 2
    first = ("encoder forward", 0.0, work.encoder.forward)
    return [first, *moved, ("encoder backward", end, end + work.encoder.backward)]


def _macro_batches(line: list[Span], work: _Work, at_once: int) -> list[Span]:
    """Put the encoder's forward and backward around the spans of each macro-batch."""
    spans: list[Span] = []
    now = 0.0
    for first in range(0, len(line), 2 * at_once):
        microbatches = line[first : first + 2 * at_once]
        spans.append(("encoder forward", now, now + work.encoder.forward))
        shift = spans[-1][2] - microbatches[0][1]
        spans += [(phase, shift + begin, shift + end) for phase, begin, end in microbatches]
        now = spans[-1][2] + work.encoder.backward
        spans.append(("encoder backward", spans[-1][2], now))
    return spans


def _all_work(plan: Plan, work: _Work, after: float, machine: Machine) -> float:
    """Return the busy seconds of all ranks together, which shared cores must work whoever waits."""
    layouts = plan.layouts
    ranks = [layouts.language.size // layouts.language.pp] * layouts.language.pp
    if layouts.non_colocated:
        ranks = [layouts.encoder.size // layouts.encoder.pp] * layouts.encoder.pp + ranks
    alone = work.macro_batches * work.encoder.total + work.bridge + after
    each = layouts.num_microbatches
    busy = [each * (cost.total + machine.microbatch_overhead) + alone for cost in work.stages]
    last = len(work.chunks) - 1
    for virtual in range(last + 1):  # messages to and from both neighbours, forward and backward
        neighbours = (virtual > 0) + (virtual < last)
        busy[virtual % len(busy)] += each * 2 * neighbours * work.hop
    return sum(count * seconds for count, seconds in zip(ranks, busy, strict=True))
