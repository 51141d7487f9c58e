# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Enumeration of all plans that may run, and search for the fastest that fit.

The program's own rules (``layout_rules``) decide what may run. If a plan needs recompute to fit the
memory, the cheapest setting that suffices is taken.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, NON_COLOCATED, Batch, Layout, Layouts
from examples.mimo.common.layout_rules import language_violation
from examples.mimo.nemotron_vlm.options.derived import FASTEST, fastest_macro_batch
from examples.mimo.nemotron_vlm.options.layout_rules import are_allowed
from examples.mimo.nemotron_vlm.options.rules import OF_DERIVED, OF_GRAPHS, OF_LAYOUTS
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED
from examples.mimo.nemotron_vlm.planner.memory import peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, Task
from examples.mimo.nemotron_vlm.planner.step_time import seconds
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

MICRO_BATCHES = (1, 2, 4, 8)
MACRO_BATCHES = (1, FASTEST, 4)
VIRTUAL = (1, 2, 4)
GRANULARITY = {"none": None, "moe": "selective", "full": "full"}
"""Megatron's words for recompute settings."""
ENCODER_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of all ranks that are tried for non-colocated encoders."""


def search(task: Task, keep: int = 10) -> tuple[list[Plan], int]:
    """Return the fastest plans that fit, in order, and the number of plans that the rules allow.

    Raises:
        UserError: no plan fits.
    """
    allowed, best = sorted(_plans(task), key=seconds), []
    for plan in allowed:
        if len(best) == keep and seconds(plan) >= seconds(best[-1]):
            break  # with recompute, the rest would take even longer
        if fits := fitting(plan):
            best = sorted([*best, fits], key=seconds)[:keep]
    if best:
        return best, len(allowed)
    why, cures = "the program's rules allow none", ["a --global-batch-size that they divide"]
    if allowed:
        memory = f"{task.machine.memory_bytes / 1e9:.0f} GB"
        why = f"of the {len(allowed)} that the program's rules allow none fits {memory}"
        cures = ["what takes less memory: see docs/planner.md"]
    more = (task.world * 2**power for power in range(1, 7))
    enough = (n for n in more if any(map(fitting, _plans(replace(task, world=n)))))
    cures.insert(0, f"by this model {n} GPUs would do" if (n := next(enough, 0)) else "other GPUs")
    raise UserError(f"no plan for {task.world} GPUs: {why}; {', or '.join(cures)}")


def fitting(plan: Plan) -> Plan | None:
    """Return the plan with the least recompute that makes it fit the memory, or None."""
    shares = (None,) if plan.layouts.non_colocated else (None, 1)
    tried = (
        replace(plan, recompute=recompute, schedule=replace(plan.schedule, recompute=share))
        for recompute, share in product(RECOMPUTED, shares)
    )
    fit = (one for one in tried if peak(one) <= plan.task.machine.memory_bytes)
    return next(filter(is_taken, fit), None)


def is_taken(plan: Plan) -> bool:
    """Return whether the program's rules allow a plan beside the other options that were given."""
    options, layouts, schedule = plan.task.options, plan.layouts, plan.schedule
    micro_size = layouts.batch.micro_size
    decided = {
        "world_size": plan.task.world,
        "placement": layouts.placement,
        "micro_batch_size": micro_size,
        "eval_micro_batch_size": options.asked.eval_micro_batch_size or micro_size,
        "encoder_macro_batch": schedule.macro_batch,
        "recompute_encoder": schedule.recompute or 0,
        "recompute_granularity": GRANULARITY[plan.recompute],
    }
    run = replace(
        options,
        args=Namespace(**vars(options.args) | decided),
        wanted=([*layouts.encoders], layouts.language),
        layouts=layouts,
        batches=[replace(each, micro_size=micro_size) for each in options.batches],
    )
    args, ranks = run.args, [each.size for each in layouts.modules]
    batches = [*run.batches]
    if args.eval_iters:
        sizes = args.eval_global_batch_size, args.eval_micro_batch_size, args.seq_length
        batches.append(Batch(*sizes))
    # First, as a broken rule of layouts searches for the nearest allowed ones, which takes long.
    others = (replace(layouts, batch=each) for each in batches if each != layouts.batch)
    if not all(are_allowed(each, ranks, options.preset) for each in others):
        return False
    return not any(rule.is_broken(run) for rule in (*OF_GRAPHS, *OF_LAYOUTS, *OF_DERIVED))


def _plans(task: Task) -> Iterator[Plan]:
    """Yield all plans that the program's rules allow, without recompute."""
    for layouts in candidates(task):
        sizes = MACRO_BATCHES if fastest_macro_batch(layouts) > 1 else (1,)
        for size in sizes:
            plan = Plan(task, layouts, schedule=EncoderSchedule(size))
            if size <= layouts.num_microbatches and is_taken(plan):
                yield plan


def candidates(task: Task) -> Iterator[Layouts]:
    """Yield all layouts that the program's rules allow; several encoders have the same ranks."""
    args, preset, count = task.options.args, task.preset, len(task.preset.encoders)
    splits = [(COLOCATED, [task.world] * (count + 1))]
    if count == 1:
        sizes = {round(share * task.world) for share in ENCODER_SHARES} - {0, task.world}
        splits += [(NON_COLOCATED, [size, task.world - size]) for size in sorted(sizes)]
    for placement, (*encoder_ranks, ranks) in splits:
        if placement not in task.placements:
            continue
        is_apart = placement == NON_COLOCATED
        encoders = list(product(*(_encoder_layouts(task, n, is_apart) for n in encoder_ranks)))
        for micro_size in MICRO_BATCHES[: 1 if args.pack else None]:
            batch = Batch(args.global_batch_size, micro_size, args.seq_length)
            for language in _language_layouts(task, ranks, not is_apart):
                if language_violation(language, ranks, preset.language, batch):
                    continue  # soon: most break a rule
                for chosen in encoders:
                    layouts = Layouts(chosen, language, batch, placement)
                    if are_allowed(layouts, [*encoder_ranks, ranks], preset):
                        yield layouts


def _encoder_layouts(task: Task, ranks: int, is_apart: bool) -> list[Layout]:
    sizes = product(_divisors(task.machine.gpus_per_node), (1, 2, 4) if is_apart else (1,))
    return [Layout(tp=tp, pp=pp, dp=ranks // (tp * pp), etp=tp) for tp, pp in sizes]


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
