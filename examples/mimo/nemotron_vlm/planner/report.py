# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Answers about a run without starting it: parameters, memory, the fastest layouts, and the command
that runs the best of them."""

import os
import shlex
from collections import Counter, defaultdict
from dataclasses import replace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, PLACEMENTS, PLANNED, SIZES, option_of, table
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE
from examples.mimo.nemotron_vlm.options.command_line import CommandLine, read
from examples.mimo.nemotron_vlm.options.derived import fastest_macro_batch
from examples.mimo.nemotron_vlm.options.on_meta import stages_on_meta
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner import parameters as params
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED
from examples.mimo.nemotron_vlm.planner.memory import host_memory_of, memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, plan_of, task_of, words_of
from examples.mimo.nemotron_vlm.planner.search import search
from examples.mimo.nemotron_vlm.planner.step_time import seconds, step_time
from megatron.training.training import num_floating_point_operations

KINDS = {"M": "Mamba-2", "G": "gated delta nets", "*": "attention", "E": "MoE", "-": "MLP"}
"""Kinds of the language model's layers."""
RECOMPUTE = {
    "none": [],
    "moe": ["--recompute-granularity selective", "--recompute-modules moe"],
    "full": ["--recompute-granularity full", "--recompute-method uniform --recompute-num-layers 1"],
}
"""Options of the program, by recompute setting."""
DECIDED = "--plan", "--recompute-", "--encoder-macro-batch", "--placement", "--micro-batch-size"
DECIDED += ("--language",)
"""Beginnings of options that a plan's command has of its own, or has not."""
GIB = 2**30


def answer(line: CommandLine) -> str:
    """Return the answer to ``--dry-run`` or ``--plan`` as text.

    The first is the model's parameters (for one rank), predicted memory and step; the second, the
    fastest plans for the GPUs.

    Raises:
        UserError: the input is bad, several processes were started, or no plan fits.
    """
    started = int(os.environ["WORLD_SIZE"])
    if started > 1:
        raise UserError(f"--dry-run and --plan tell of all ranks: start 1 rank, not {started}")
    if line.args.plan > 0:
        return _describe(*_fastest(line, line.args.plan))
    ranks = line.args.dry_run
    os.environ["WORLD_SIZE"] = str(ranks)  # HyperCommGrid checks its size against it
    options = Run.of(line, ranks)
    parameters = [_parameters(options)] if ranks == 1 else []
    return "\n".join([*parameters, *_predictions(plan_of(options))])


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
    sizes = {option_of(name) for names in SIZES.values() for name in names.values()}
    sizes = sorted(sizes & line.given)
    if own.language not in ("", PLANNED) or own.encoder or sizes:
        names = ", ".join(sizes) or "--language and --encoder"
        raise UserError(f"the planner finds the layouts: leave out {names}")
    given = ", ".join(sorted(name for name in line.given if name.startswith("--recompute-")))
    if given and own.language == PLANNED:
        raise UserError(f"--language planned chooses what is recomputed: leave out {given}")
    # The plans decide these; read as one rank, the command line must not ask for more.
    alone = ["--placement", COLOCATED, "--micro-batch-size", "1", "--language="]
    task = task_of(Run.of([*line.words, *alone], 1), ranks, **figures)
    placements = (own.placement,) if "--placement" in line.given else PLACEMENTS
    return search(replace(task, placements=placements))


def _parameters(options: Run) -> str:
    """Return a table of parameters by part, in total and active per token (top-k experts)."""
    sizes, counts = options.preset.language, defaultdict(Counter)
    with stages_on_meta(options, 0) as stages:
        if options.adapters:
            options.adapters.check({word for stage in stages for word in stage.words})
        for place, number in params.by_place(stages).items():
            (name, part), kind = place.part, place.kind
            parts = ["language model", f"language: {KINDS.get(kind, kind)}"]
            if place.is_adapter:
                parts = ["LoRA adapters"]
            elif place.part != LANGUAGE:
                parts = [f"{name} {part}" if options.preset.names[1:] else part]
            share = sizes.moe_router_topk / sizes.num_experts if kind == params.EXPERT else 1.0
            for each in (*parts, "all"):
                counts[each].update(total=number, active=number * share)
    ordered = sorted(counts, key=lambda part: (part == "all", part == "language model", part))
    rows = [[part, *(f"{n / 1e9:.4f} B" for n in counts[part].values())] for part in ordered]
    return table([["part", "total", "active"], *rows])


def _predictions(asked: Plan) -> list[str]:
    """Return the predicted memory by stage, the most of a rank with less or more kept, and the
    predicted step."""
    task, others = asked.task, {f"recompute {n}": {"recompute": n} for n in RECOMPUTED}
    if not asked.layouts.non_colocated:
        one = replace(asked.schedule, macro_batch=1)
        others["encoder macro-batch 1"] = {"schedule": one}
        others["encoder recompute 1"] = {"schedule": replace(asked.schedule, recompute=1)}
    peaks = (f"{name} {gib(peak(replace(asked, **change)))}" for name, change in others.items())
    precision = "16 bits" if task.machine.precision == 2 else "fp32"
    parts = (f"{name} {part:.2g}" for name, part in step_time(asked).items() if part)
    number = asked.layouts.num_microbatches
    return [
        f"predicted GiB of a rank in {precision}, recompute {asked.recompute}, with "
        f"{words_of(task.preset, task.inputs)}:",
        memory_table(asked),
        f"most of a rank with {', '.join(peaks)}",
        f"predicted step of {number} microbatches: {seconds(asked):.3g} s ({', '.join(parts)})",
    ]


def command(plan: Plan) -> list[str]:
    """Return the lines of the command that runs a plan on GPUs, with all other options given."""
    world, per_node, options = plan.task.world, plan.task.machine.gpus_per_node, plan.task.options
    words, is_own = [], True
    # As few nodes as give the ranks together, with as many on each.
    nodes = next(n for n in range(-(-world // per_node), world + 1) if world % n == 0)
    launch = f"torchrun --nproc-per-node {world // nodes}"
    if nodes > 1:
        launch += f" --nnodes {nodes}"
        launch += " --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:29500"
    for word in options.line.words:
        if word.startswith("--"):  # its values follow
            is_own = not word.startswith(DECIDED)
        words += [word] * is_own
    precision = "" if options.args.fp16 else " --bf16"
    return [
        f"{launch} examples/mimo/pretrain_nemotron_vlm.py",
        *[shlex.join(words)] * bool(words),
        f"--device cuda{precision}",
        *choices_of(plan),
    ]


def choices_of(plan: Plan) -> list[str]:
    """Return the options that a plan decides."""
    lay, schedule = plan.layouts, plan.schedule
    encoders = [f"--encoder {text}" for text in lay.named_encoders(plan.task.preset.names)]
    options = [
        f"--placement {lay.placement} --micro-batch-size {lay.batch.micro_size}",
        " ".join([*encoders, f"--language {lay.language}"]),
        *RECOMPUTE[plan.recompute],
    ]
    if max(schedule.macro_batch, fastest_macro_batch(lay)) > 1:
        options.append(f"--encoder-macro-batch {schedule.macro_batch}")
    if schedule.recompute:
        options.append(f"--recompute-encoder {schedule.recompute}")
    return options


def _describe(plans: list[Plan], allowed: int) -> str:
    """Return everything that is printed about the best plans of those that the rules allow."""
    best = plans[0]
    task, machine, batch = best.task, best.task.machine, best.layouts.batch
    title = (
        f"{task.preset.name} on {task.world} GPUs, {machine.gpus_per_node} a node: global batch "
        f"{batch.global_size}, {batch.seq_length} tokens and {words_of(task.preset, task.inputs)}\n"
        f"the best that fit {machine.memory_bytes / 1e9:.0f} GB of {allowed} plans; "
        f"{machine.source}"
    )
    width = task.preset.language.hidden_size
    encoding = (each.mean(each.encoder.operations(each.sizes, width)) for each in task.inputs)
    # Megatron's own count of the language model's operations; what is recomputed does not count.
    squares = {"seqlen_squared_sum_in_batch": task.squares}
    operations = num_floating_point_operations.__wrapped__(task.options.args, 1, **squares)
    operations += sum(encoding)
    rows = [{"": str(number)} | _row(plan, operations) for number, plan in enumerate(plans, 1)]
    memory = f"memory of the best, GiB of a rank by pipeline stage\n{memory_table(best)}"
    run = "run it with\n" + " \\\n    ".join(command(best))
    return "\n\n".join([title, table([[*rows[0]], *(row.values() for row in rows)]), memory, run])


def _row(plan: Plan, operations: float) -> dict[str, str]:
    """Return a plan's cells by their heads; a row of tokens takes ``operations``."""
    parts, step, batch = step_time(plan), seconds(plan), plan.layouts.batch
    again = [plan.recompute] * (plan.recompute != "none")
    again += [f"encoder/{plan.schedule.recompute}"] * bool(plan.schedule.recompute)
    macro_batch = f"×{plan.schedule.macro_batch}" * (plan.schedule.macro_batch > 1)
    rows_a_gpu = batch.global_size / step / plan.task.world
    return {
        "s/step": f"{step:.3f}",
        "tokens/s/GPU": f"{rows_a_gpu * batch.seq_length:,.0f}",
        "TFLOP/s": f"{rows_a_gpu * operations / 1e12:.0f}",
        "GiB": gib(peak(plan)),
        **{name: f"{parts[name] / step:.1%}" for name in ("bubble", "communication", "gradients")},
        "encoder": " ".join(plan.layouts.named_encoders(plan.task.preset.names)),
        "language": str(plan.layouts.language),
        "micro": f"{batch.micro_size}{macro_batch}",
        "recompute": "+".join(again) or "-",
        "placement": plan.layouts.placement,
    }


def memory_table(plan: Plan) -> str:
    """Return a table of a rank's GiB by pipeline stage and part, and a line about host memory."""
    memory, hosts = memory_of(plan), host_memory_of(plan)
    names = dict.fromkeys(name for parts in memory.values() for name in parts if parts[name])
    rows = [["stage", *names, "sum"]]
    for stage, parts in memory.items():
        sizes = [parts.get(name, 0.0) for name in names]
        rows.append([stage, *map(gib, (*sizes, sum(sizes)))])
    ranks = min(plan.task.world, plan.task.machine.gpus_per_node)
    state, save = (gib(ranks * max(host[kind] for host in hosts)) for kind in ("state", "save"))
    host = f"GiB of host memory for {ranks} ranks of a node: optimizer {state}, a save {save} more"
    return f"{table(rows)}\n{host}"


def gib(size: float) -> str:
    """Format bytes in GiB, with three digits, or all digits before the point."""
    return f"{size / GIB:.3g}" if size < 1000 * GIB else f"{size / GIB:.0f}"
