# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Answers about a run without starting it: parameters, memory, and the fastest layouts."""

import os
from collections import Counter, defaultdict
from dataclasses import replace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, PLACEMENTS, PLANNED, table
from examples.mimo.nemotron_vlm.options.command_line import CommandLine, read
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner import parameters as params
from examples.mimo.nemotron_vlm.planner.inputs import words_of
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED
from examples.mimo.nemotron_vlm.planner.memory import peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, plan_of, task_of
from examples.mimo.nemotron_vlm.planner.report import choices_of, describe, gib, memory_table
from examples.mimo.nemotron_vlm.planner.search import search
from examples.mimo.nemotron_vlm.planner.step_time import seconds, step_time

KINDS = {"M": "Mamba-2", "G": "gated delta nets", "*": "attention", "E": "MoE", "-": "MLP"}
KINDS |= {params.EXPERT: "routed experts", params.FIRST: "embedding", params.LAST: "norm, output"}
"""Rows of the table of parameters, by their place in the language model."""


def dry_run(line: CommandLine) -> str:
    """Return the model's parameters (for one rank), predicted memory and step as text.

    Raises:
        UserError: the input is bad, or several processes were started.
    """
    _check_alone()
    ranks = line.args.dry_run
    os.environ["WORLD_SIZE"] = str(ranks)  # HyperCommGrid checks its size against it
    options = Run.of(line, ranks)
    asked = plan_of(options)
    parameters = [_parameters(options)] if ranks == 1 else []
    return "\n".join([*parameters, _memory(asked), _step(asked)])


def plan(line: CommandLine) -> str:
    """Return the fastest plans for the GPUs of ``--plan``, as text.

    Raises:
        UserError: the input is bad, several processes were started, or no plan fits.
    """
    _check_alone()
    return describe(*_fastest(line, line.args.plan))


def planned(line: CommandLine, ranks: int) -> CommandLine:
    """Return the command line with the fastest plan in place of ``--language planned``.

    All ranks find the same one. The nodes have as many GPUs as ranks, if nothing else is said.

    Raises:
        UserError: the input is bad, or no plan fits.
    """
    figures = {}
    if not line.args.dry_run and "--plan-gpus-per-node" not in line.given:
        figures["gpus_per_node"] = int(os.environ["LOCAL_WORLD_SIZE"])
    (best, *_), _ = _fastest(line, ranks, **figures)
    return read([*line.words, *" ".join(choices_of(best)).split()])


def _fastest(line: CommandLine, ranks: int, **figures: int) -> tuple[list[Plan], int]:
    own = line.args
    if own.language not in ("", PLANNED) or own.encoder:
        raise UserError("the planner finds the layouts: leave out --language and --encoder")
    given = {word.split("=")[0]: None for word in line.words if word.startswith("--recompute-")}
    if given and own.language == PLANNED:
        raise UserError(
            f"--language planned chooses what is recomputed: leave out {', '.join(given)}"
        )
    # The plans decide these; read as one rank, the command line must not ask for more.
    alone = ["--placement", COLOCATED, "--micro-batch-size", "1", "--language="]
    task = task_of(Run.of([*line.words, *alone], 1), ranks, **figures)
    placements = (own.placement,) if "--placement" in line.given else PLACEMENTS
    return search(replace(task, placements=placements))


def _check_alone() -> None:
    started = int(os.environ["WORLD_SIZE"])
    if started > 1:
        raise UserError(f"--dry-run and --plan tell of all ranks: start 1 rank, not {started}")


def _parameters(options: Run) -> str:
    """Return a table of parameters by part, in total and active per token (top-k experts)."""
    sizes, counts = options.preset.language, defaultdict(Counter)
    with params.stages_on_meta(options, 0) as stages:
        if options.adapters:
            options.adapters.check({word for stage in stages for word in stage.words})
        held, added = (list(each.items()) for each in params.by_place(stages))
        for number, (place, numbers) in enumerate(held + added):
            parts = ["language model", f"language: {KINDS.get(place, place)}"]
            if isinstance(place, tuple):
                part = params.PROJECTOR if place[1] == params.PROJECTOR else "encoder"
                parts = [f"{place[0]} {part}" if options.preset.names[1:] else part]
            share = sizes.moe_router_topk / sizes.num_experts if place == params.EXPERT else 1.0
            parts = ["LoRA adapters"] if number >= len(held) else parts
            for part in (*parts, "all"):
                counts[part].update(total=sum(numbers), active=sum(numbers) * share)
    ordered = sorted(counts, key=lambda part: (part == "all", part == "language model", part))
    rows = [[part, *(f"{n / 1e9:.4f} B" for n in counts[part].values())] for part in ordered]
    return table([["part", "total", "active"], *rows])


def _memory(asked: Plan) -> str:
    """Return the predicted memory by stage, and the most of a rank with less or more kept."""
    task, others = asked.task, {f"recompute {n}": {"recompute": n} for n in RECOMPUTED}
    if not asked.layouts.non_colocated:
        one = replace(asked.schedule, macro_batch=1)
        others["encoder macro-batch 1"] = {"schedule": one}
        others["encoder recompute 1"] = {"schedule": replace(asked.schedule, recompute=1)}
    peaks = (f"{name} {gib(peak(replace(asked, **change)))}" for name, change in others.items())
    precision = "16 bits" if task.machine.precision == 2 else "fp32"
    return (
        f"predicted GiB of a rank in {precision}, recompute {asked.recompute}, with "
        f"{words_of(task.preset, task.inputs)}:\n{memory_table(asked)}\n"
        f"most of a rank with {', '.join(peaks)}"
    )


def _step(asked: Plan) -> str:
    parts = (f"{name} {part:.2g}" for name, part in step_time(asked).items() if part)
    number = asked.layouts.num_microbatches
    return f"predicted step of {number} microbatches: {seconds(asked):.3g} s ({', '.join(parts)})"
