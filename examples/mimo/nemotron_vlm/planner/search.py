# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Enumeration of all plans that may run, and search for the fastest.

The program's own rules (``layout_rules``) decide what may run; plans that do not fit the memory are
left out. If a layout needs recompute to fit, the cheapest setting that suffices is taken. All plans
are priced by a formula, and the best of them by simulating their schedule.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, NON_COLOCATED, PLACEMENTS, Batch, Layout, Layouts
from examples.mimo.common.layout_rules import language_violation
from examples.mimo.nemotron_vlm.loop.encoder_schedule import FASTEST, fastest_macro_batch
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.layout_rules import encoder_violation, pair_violation
from examples.mimo.nemotron_vlm.planner.inputs import Inputs
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.memory import Memory, memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, StateBytes
from examples.mimo.nemotron_vlm.planner.step_time import StepTime, estimate, step_time
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

MICRO_SIZES = (1, 2, 4, 8)
MACRO_BATCHES = (1, FASTEST, 4)
VIRTUAL = (1, 2, 4)
ENCODER_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of all ranks that are tried for non-colocated encoders."""
SIMULATED = 40
"""Number of plans whose schedule is simulated."""
IN_16_BITS = 2.0, 6.0
"""`StateBytes` of gradient and optimizer with `OPTIONS_16_BITS`."""
OPTIONS_16_BITS = (
    "--use-precision-aware-optimizer --main-params-dtype fp16 --main-grads-dtype bf16 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
)


@dataclass(frozen=True)
class Task:
    """The training run to plan."""

    preset: VLMPreset
    world: int  # number of GPUs
    machine: Machine  # their figures
    seq_length: int
    global_batch: int
    inputs: tuple[Inputs, ...]  # of a sample, for each encoder
    operations: float  # of a sample's forward and backward, for reported throughput
    placements: tuple[str, ...] = PLACEMENTS  # that may be chosen
    micro_sizes: tuple[int, ...] = MICRO_SIZES  # microbatches that may be chosen
    state: StateBytes = StateBytes()
    frozen: frozenset[ModelPart] = frozenset()
    given: tuple[str, ...] = ()  # options that plans do not decide, with their values


class Priced(NamedTuple):
    """A plan with its step time, and the memory of a rank of each stage."""

    plan: Plan
    step: StepTime
    memory: list[Memory]


class Found(NamedTuple):
    """The best plans, fastest first, and how many plans the rules allow, fitting or not."""

    best: list[Priced]
    allowed: int


def search(task: Task, keep: int = 10) -> Found:
    """Return the ``keep`` fastest plans.

    Raises:
        UserError: no plan fits.
    """
    machine = task.machine
    fastest: list[tuple[float, int, Plan]] = []  # a heap, the slowest first
    allowed = 0
    for allowed, plan in enumerate(_plans(task), start=1):
        slowest = -fastest[0][0] if len(fastest) == SIMULATED else math.inf
        if estimate(plan, machine) >= slowest:
            continue  # with recompute it would take even longer
        if plan := fitting(plan, machine):
            heapq.heappush(fastest, (-estimate(plan, machine), allowed, plan))
            if len(fastest) > SIMULATED:
                heapq.heappop(fastest)
    if not fastest:
        size = f"{machine.memory_bytes / 1e9:.0f} GB"
        of_allowed = f"of the {allowed} that the program's rules allow none fits {size}"
        why = of_allowed if allowed else "the program's rules allow none"
        cures = _cures(task) if allowed else ["a --global-batch-size that they divide"]
        enough = _enough(task)
        cures.insert(0, f"by this model {enough} GPUs would do" if enough else "other GPUs")
        raise UserError(f"no plan for {task.world} GPUs: {why}; {', or '.join(cures)}")
    best = [
        Priced(plan, step_time(plan, machine), memory_of(plan, machine)) for _, _, plan in fastest
    ]
    best.sort(key=lambda priced: priced.step.seconds)
    return Found(best[:keep], allowed)


def _cures(task: Task) -> list[str]:
    """Return what makes a plan fit the same GPUs: a sequence length, or a smaller state."""
    cures = []
    for part in (2, 4, 8):
        inputs = tuple(replace(each, mean=each.mean / part) for each in task.inputs)
        if _fits(replace(task, seq_length=task.seq_length // part, inputs=inputs)):
            cures.append(f"--seq-length {task.seq_length // part}")
            break
    small = StateBytes(*map(min, task.state, IN_16_BITS), task.state.logit)
    if small != task.state and _fits(replace(task, state=small)):
        cures.append(f"the state in 16 bits: {OPTIONS_16_BITS}")
    return cures


def _fits(task: Task) -> bool:
    return any(fitting(plan, task.machine) for plan in _plans(task))


def _enough(task: Task) -> int | None:
    """Return the smallest of 2, 4, … 64 times as many GPUs on which a plan fits, or None."""
    for more in (replace(task, world=task.world * 2**power) for power in range(1, 7)):
        if _fits(more):
            return more.world
    return None


def _plans(task: Task) -> Iterator[Plan]:
    """Yield all plans that the program's rules allow, without recompute."""
    for layouts in candidates(task):
        for macro_batch in _macro_batches(layouts):
            schedule = EncoderSchedule(macro_batch)
            how = {"schedule": schedule, "state": task.state, "frozen": task.frozen}
            yield Plan(task.preset, layouts, task.inputs, **how)


def candidates(task: Task) -> Iterator[Layouts]:
    """Yield all pairs of layouts that the program's rules allow."""
    for placement, encoder_ranks, language_ranks in _splits(task):
        is_apart = placement == NON_COLOCATED
        encoders = _encoder_layouts(task, encoder_ranks, is_apart)
        for micro_size in task.micro_sizes:
            batch = Batch(task.global_batch, micro_size, task.seq_length)
            for language in _language_layouts(task, language_ranks, not is_apart):
                if language_violation(language, language_ranks, task.preset.language, batch):
                    continue
                for chosen in encoders:
                    layouts = Layouts(chosen, language, batch, placement)
                    if not any(pair_violation(each, layouts) for each in chosen):
                        yield layouts


def fitting(plan: Plan, machine: Machine) -> Plan | None:
    """Return the plan with the least recompute that makes it fit the memory, or None."""
    shares = (None,) if plan.layouts.non_colocated else (None, 1)
    for recompute in RECOMPUTED:
        for share in shares:
            schedule = replace(plan.schedule, recompute=share)
            tried = replace(plan, recompute=recompute, schedule=schedule)
            if peak(memory_of(tried, machine)) <= machine.memory_bytes:
                return tried
    return None


def _macro_batches(layouts: Layouts) -> tuple[int, ...]:
    """Return the macro-batch sizes to try; just 1 if the schedule leaves no choice."""
    if fastest_macro_batch(layouts) == 1:
        return (1,)
    return tuple(size for size in MACRO_BATCHES if size <= layouts.num_microbatches)


def _splits(task: Task) -> Iterator[tuple[str, int, int]]:
    """Yield placements with the number of ranks of each encoder and of the language model.

    Several encoders are planned on the same ranks only.
    """
    if COLOCATED in task.placements:
        yield COLOCATED, task.world, task.world
    if NON_COLOCATED in task.placements and len(task.preset.encoders) == 1:
        sizes = {round(share * task.world) for share in ENCODER_SHARES}
        for size in sorted(sizes - {0, task.world}):
            yield NON_COLOCATED, size, task.world - size


def _encoder_layouts(task: Task, ranks: int, is_apart: bool) -> list[tuple[Layout, ...]]:
    """Return the layouts of the encoders, in all combinations that each may have."""
    sizes = product(_divisors(task.machine.gpus_per_node), (1, 2, 4) if is_apart else (1,))
    tried = [Layout(tp=tp, pp=pp, dp=ranks // (tp * pp), etp=tp) for tp, pp in sizes]
    allowed = [
        [lay for lay in tried if not encoder_violation(ranks, each, is_apart, lay)]
        for each in task.preset.encoders
    ]
    return list(product(*allowed))


def _language_layouts(task: Task, ranks: int, interleaved: bool) -> Iterator[Layout]:
    layers = len(task.preset.language.hybrid_layer_pattern.replace("|", ""))
    experts = _divisors(task.preset.language.num_experts)
    axes = _divisors(task.machine.gpus_per_node), (1, 2, 4, 8, 16), _divisors(layers)
    for tp, cp, pp in product(*axes):
        if ranks % (tp * cp * pp) == 0:
            dp, vpps = ranks // (tp * cp * pp), VIRTUAL if interleaved and pp > 1 else (1,)
            for vpp, ep, etp in product(vpps, experts, sorted({1, tp})):
                yield Layout(tp, cp, pp, dp, ep, etp, vpp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
