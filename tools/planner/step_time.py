# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step: its pieces in the order of the runtime's schedule.

Colocated: without a pipeline, encoder, bridge and language model of each microbatch one after the
other; with one, three phases (docs/colocated-pipeline.md). Non-colocated: one pipeline of both.
Nothing overlaps: neither collectives nor the optimizer's, as by default in the program.
"""

from __future__ import annotations

from dataclasses import dataclass

from layout_view.schedule import Span, simulate
from planner.communication import groups_of, send
from planner.costs import Cost, after_backward, bridge_seconds, encoder_cost, language_chunks
from planner.machine import Machine
from planner.plan import Plan


@dataclass(frozen=True)
class Step:
    """A step's time, and where it goes.

    Attributes:
        seconds: of the step.
        parts: seconds of a rank of the busiest pipeline stage; ``bubble`` is its waiting.
        stages: names of the pipeline's stages. spans: what each does when; none of an estimate.
    """

    seconds: float
    parts: dict[str, float]
    stages: list[str]
    spans: list[list[Span]]


@dataclass(frozen=True)
class _Work:
    """A pipeline: cost of a microbatch by virtual stage, and the module of each stage."""

    chunks: list[Cost]
    modules: list[str]
    hop: float

    @property
    def stages(self) -> list[Cost]:
        """Cost by stage, of all its virtual stages."""
        size = len(self.modules)
        return [sum(self.chunks[stage::size], Cost()) for stage in range(size)]


def step_time(plan: Plan, machine: Machine, gpus_per_node: int, exact: bool = True) -> Step:
    """Price one step.

    Args:
        exact: simulate the pipeline, microbatch by microbatch; else a formula, for searches.
    """
    layouts, number = plan.layouts, plan.layouts.num_microbatches
    groups = groups_of(layouts.encoder, gpus_per_node)
    bridge = bridge_seconds(plan, machine, gpus_per_node)
    in_phases = layouts.language.pp > 1 and not layouts.non_colocated
    encoder = encoder_cost(plan, machine, groups["tp"], number if in_phases else 1)
    if in_phases and plan.recompute_encoder:
        encoder += Cost(recompute=encoder.forward)
    work = _pipeline(plan, machine, gpus_per_node, encoder, bridge / number)
    overhead = machine.microbatch_overhead

    def seconds(way: str, virtual: int) -> float:
        return getattr(work.chunks[virtual], way) + overhead / 2 / layouts.language.vpp

    if exact:
        spans = simulate(work.modules, seconds, number, layouts.language.vpp, work.hop)
        length = max(line[-1][2] for line in spans)
    else:
        spans = []
        each = [cost.total + overhead for cost in work.stages]
        ends = (sum(each) - max(each)) / layouts.language.vpp + 2 * (len(each) - 1) * work.hop
        length = number * max(each) + ends
    if in_phases:
        spans = [_phases(line, encoder, bridge, length) for line in spans]
        length += encoder.total + bridge
    gradients, optimizer = after_backward(plan, machine, gpus_per_node)
    after = {
        "gradients": gradients,
        "optimizer": optimizer,
        "overhead": machine.step_overhead + number * overhead,
    }
    total = length + gradients + optimizer + machine.step_overhead
    if machine.shared_cores:
        total = max(total, _all_work(plan, work, encoder if in_phases else Cost(), after) / machine.shared_cores)
    busiest = max(work.stages, key=lambda cost: cost.total)
    parts = {name: number * value for name, value in vars(busiest).items()}
    if in_phases:
        parts = {name: value + vars(encoder)[name] for name, value in parts.items()}
    parts |= after | {"bridge": bridge}
    parts["bubble"] = max(0.0, total - sum(parts.values()))
    return Step(total, parts, _names(plan), spans)


def _names(plan: Plan) -> list[str]:
    names = [f"stage {stage}" for stage in range(plan.layouts.language.pp)]
    if plan.layouts.non_colocated:
        return [f"encoder {stage}" for stage in range(plan.layouts.encoder.pp)] + names
    return names


def _pipeline(plan: Plan, machine: Machine, gpus_per_node: int, encoder: Cost, bridge: float) -> _Work:
    layouts = plan.layouts
    e, lay = layouts.encoder, layouts.language
    chunks = language_chunks(plan, machine, gpus_per_node)
    modules = ["language"] * lay.pp
    rows = plan.rows(machine)
    size = rows.samples * rows.seq_length / lay.cp / lay.tp * plan.preset.language.hidden_size
    group = groups_of(lay, gpus_per_node, layouts.language_offset)["pp"]
    hop = send(machine, group, size * machine.precision)
    if layouts.non_colocated:
        modules = ["encoder"] * e.pp + modules
        return _Work([encoder] * e.pp + chunks, modules, max(hop, bridge / 2))
    if lay.pp == 1:
        return _Work([encoder + chunks[0] + Cost(context=bridge)], modules, 0.0)
    return _Work(chunks, modules, hop)


def _phases(line: list[Span], encoder: Cost, bridge: float, length: float) -> list[Span]:
    """A stage's whole step: encoder, its part of the pipeline, and the encoder's backward."""
    begin = encoder.forward + bridge / 2
    end = begin + length + bridge / 2
    moved = [(phase, begin + start, begin + stop) for phase, start, stop in line]
    first = ("encoder forward", 0.0, encoder.forward)
    return [first, *moved, ("encoder backward", end, end + encoder.backward)]


def _all_work(plan: Plan, work: _Work, encoder: Cost, after: dict[str, float]) -> float:
    """Seconds of all ranks together: what shared cores have to do, whoever waits for whom."""
    layouts = plan.layouts
    ranks = [layouts.language.size // layouts.language.pp] * layouts.language.pp
    if layouts.non_colocated:
        ranks = [layouts.encoder.size // layouts.encoder.pp] * layouts.encoder.pp + ranks
    number = layouts.num_microbatches
    busy = sum(n * number * cost.total for n, cost in zip(ranks, work.stages, strict=True))
    return busy + sum(ranks) * (encoder.total + sum(after.values()))
