# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""All plans that may run, and the fastest of them.

The program's own rules decide what may run (``layout_rules``); a plan that does not fit the memory
is left out. Of the recomputes that make a layout fit, the one that costs least is taken. All plans
are priced by a formula, and the best of them by simulating their schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from examples.mimo.nemotron_vlm.layout import Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.layout_rules import (
    encoder_violation,
    language_violation,
    pair_violation,
)
from examples.mimo.nemotron_vlm.placement import COLOCATED, NON_COLOCATED
from examples.mimo.nemotron_vlm.presets import VLMPreset
from examples.mimo.nemotron_vlm.recurrent_cp import STATE_PASSING
from planner.activations import KEPT_FOR_LAYER
from planner.machine import Machine
from planner.memory import Parts, memory_of, peak
from planner.plan import Plan, Tiles
from planner.step_time import Step, estimate, step_time

MICRO_SIZES = (1, 2, 4, 8)
MACRO_BATCH = 4
VIRTUAL = (1, 2, 4)
ENCODER_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Of all ranks, that non-colocated encoders get."""
SIMULATED = 40
"""Plans whose schedule is simulated."""


@dataclass(frozen=True)
class Task:
    """What to plan for.

    Attributes:
        world: GPUs.
        images: tiles of a sample. imbalance: of experts' tokens, see ``Plan``.
        placements: that may be chosen.
    """

    preset: VLMPreset
    world: int
    gpus_per_node: int
    seq_length: int
    global_batch: int
    images: Tiles
    imbalance: float = 1.0
    placements: tuple[str, ...] = (COLOCATED, NON_COLOCATED)


@dataclass(frozen=True)
class Priced:
    """A plan with its step and the memory of each stage's rank."""

    plan: Plan
    step: Step
    memory: list[Parts]


@dataclass(frozen=True)
class Found:
    """The outcome: the best plans, fastest first, and how many fitted and did not."""

    best: list[Priced]
    counts: dict[str, int]


def search(task: Task, machine: Machine, keep: int = 10) -> Found:
    """The fastest plans."""
    counts: Counter[str] = Counter()
    estimates = []
    for layouts in candidates(task):
        for macro_batch in _macro_batches(layouts):
            plan = fitting(task, layouts, machine, macro_batch)
            counts["too large" if plan is None else "fit"] += 1
            if plan is not None:
                seconds = estimate(plan, machine, task.gpus_per_node)
                estimates.append((seconds, len(estimates), plan))
    best = [
        Priced(plan, step_time(plan, machine, task.gpus_per_node), memory_of(plan, machine))
        for _, _, plan in sorted(estimates)[:SIMULATED]
    ]
    best.sort(key=lambda priced: priced.step.seconds)
    return Found(best[:keep], dict(counts))


def candidates(task: Task) -> Iterator[Layouts]:
    """All pairs of layouts that the program's rules allow."""
    for placement, encoder_ranks, language_ranks in _splits(task):
        is_apart = placement == NON_COLOCATED
        encoders = [
            lay
            for lay in _encoder_layouts(task, encoder_ranks, is_apart)
            if not encoder_violation(lay, encoder_ranks, task.preset, is_apart)
        ]
        for micro_size in MICRO_SIZES:
            batch = Batch(task.global_batch, micro_size, task.seq_length)
            for language in _language_layouts(task, language_ranks, not is_apart):
                rest = task.preset, batch, STATE_PASSING
                if language_violation(language, language_ranks, *rest):
                    continue
                for encoder in encoders:
                    layouts = Layouts(encoder, language, batch, placement)
                    if not pair_violation(layouts):
                        yield layouts


def fitting(task: Task, layouts: Layouts, machine: Machine, macro_batch: int) -> Plan | None:
    """The plan of these layouts that fits with the least recompute."""
    plan = Plan(
        task.preset,
        layouts,
        task.images,
        macro_batch=macro_batch,
        imbalance=task.imbalance,
    )
    shares = (0, 1) if plan.encoded_at_once > 1 else (0,)
    for recompute in KEPT_FOR_LAYER:
        for share in shares:
            tried = replace(plan, recompute=recompute, recompute_encoder=share)
            if peak(memory_of(tried, machine)) <= machine.memory_bytes:
                return tried
    return None


def _macro_batches(layouts: Layouts) -> tuple[int, ...]:
    """Sizes that are tried: without a pipeline, one microbatch or several at once."""
    if layouts.non_colocated or layouts.language.pp > 1 or layouts.num_microbatches == 1:
        return (1,)
    return 1, min(MACRO_BATCH, layouts.num_microbatches)


def _splits(task: Task) -> Iterator[tuple[str, int, int]]:
    """Placement, ranks of the encoder and of the language model."""
    if COLOCATED in task.placements:
        yield COLOCATED, task.world, task.world
    if NON_COLOCATED in task.placements:
        sizes = {round(share * task.world) for share in ENCODER_SHARES}
        for size in sorted(sizes - {0, task.world}):
            yield NON_COLOCATED, size, task.world - size


def _encoder_layouts(task: Task, ranks: int, pipelined: bool) -> Iterator[Layout]:
    for tp in _divisors(min(task.gpus_per_node, ranks)):
        for pp in (1, 2, 4) if pipelined else (1,):
            if ranks % (tp * pp) == 0:
                yield Layout(tp=tp, pp=pp, dp=ranks // (tp * pp), etp=tp)


def _language_layouts(task: Task, ranks: int, interleaved: bool) -> Iterator[Layout]:
    layers = len(task.preset.language.hybrid_layer_pattern.replace("|", ""))
    experts = _divisors(task.preset.language.num_experts)
    for tp in _divisors(task.gpus_per_node):
        for cp in (1, 2, 4, 8, 16):
            for pp in _divisors(layers):
                if ranks % (tp * cp * pp):
                    continue
                dp = ranks // (tp * cp * pp)
                for vpp in VIRTUAL if interleaved and pp > 1 else (1,):
                    for ep in experts:
                        for etp in sorted({1, tp}):
                            yield Layout(tp, cp, pp, dp, ep, etp, vpp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
