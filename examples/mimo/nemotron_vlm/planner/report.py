# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plans as a table and as data, with the command that runs the best of them."""

import shlex
from dataclasses import asdict
from operator import attrgetter

from examples.mimo.common.layout import SIZES, option_of, table
from examples.mimo.nemotron_vlm.loop.encoder_schedule import fastest_macro_batch
from examples.mimo.nemotron_vlm.planner.inputs import words_of
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.memory import memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import stages_of_pipeline
from examples.mimo.nemotron_vlm.planner.search import Found, Priced, Task

RECOMPUTE = {
    "none": [],
    "moe": ["--recompute-granularity selective", "--recompute-modules moe"],
    "full": ["--recompute-granularity full", "--recompute-method uniform --recompute-num-layers 1"],
}
"""Options of the program, by recompute setting."""
DECIDED = """--model --device --bf16 --fp16 --seq-length --global-batch-size --placement
    --micro-batch-size --encoder --language --encoder-macro-batch
    --recompute-encoder --recompute-granularity --recompute-modules --recompute-method
    --recompute-num-layers --recompute-activations --plan --plan-gpu --plan-gpus-per-node
    --plan-tiles --plan-json""".split()
DECIDED += [option_of(name) for names in SIZES.values() for name in names.values()]
"""Options that a plan's command has of its own, or has not."""
GIB = 2**30
HEADS = ["", "s/step", "tokens/s/GPU", "TFLOP/s", "GiB", "bubble", "bridge", "all-to-all"]
HEADS += ["other comm.", "encoder", "language", "micro", "recompute", "placement"]
SHARES = ("bubble", "bridge", "experts")
COLLECTIVES = ("tensor", "context", "gradients")
"""Parts of a step that are shown each, and those that are one column."""


def command(task: Task, plan: Plan, model: str) -> list[str]:
    """Return the lines of the command that runs a plan."""
    per_node = task.machine.gpus_per_node
    launch = f"torchrun --nproc-per-node {min(task.world, per_node)}"
    if task.world > per_node:
        nodes = -(-task.world // per_node)
        launch += f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:29500"
    program = f"{launch} examples/mimo/pretrain_nemotron_vlm.py"
    given = [shlex.join(task.given)] * bool(task.given)
    return [program, *options_of(plan, model), *given]


def options_of(plan: Plan, model: str) -> list[str]:
    """Return the program's options for a plan on GPUs."""
    batch = plan.layouts.batch
    return [
        f"--model {model} --device cuda --bf16",
        f"--seq-length {batch.seq_length} --global-batch-size {batch.global_size}",
        *choices_of(plan),
    ]


def choices_of(plan: Plan) -> list[str]:
    """Return the options that a plan decides."""
    lay, schedule = plan.layouts, plan.schedule
    encoders = [f"--encoder {text}" for text in lay.named_encoders(plan.preset.names)]
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


def describe(task: Task, found: Found, model: str) -> str:
    """Return everything that is printed about the plans found."""
    machine, best = task.machine, found.best[0]
    title = (
        f"{task.preset.name} on {task.world} GPUs, {machine.gpus_per_node} a node: "
        f"{task.seq_length} tokens and {words_of(task.preset, task.inputs)} a sample, "
        f"global batch {task.global_batch}\n"
        f"the best that fit {machine.memory_bytes / 1e9:.0f} GB of {found.allowed} plans; "
        f"{machine.source}"
    )
    rows = [[str(number), *_row(task, priced)] for number, priced in enumerate(found.best, 1)]
    parts = [
        title,
        table([HEADS, *rows]),
        f"memory of the best, GiB of a rank by pipeline stage\n{memory_table(best.plan, machine)}",
        "run it with\n" + " \\\n    ".join(command(task, best.plan, model)),
    ]
    return "\n\n".join(parts)


def _row(task: Task, priced: Priced) -> list[str]:
    figures, plan, schedule = figures_of(task, priced), priced.plan, priced.plan.schedule
    step, parts = priced.step.seconds, priced.step.parts
    again = [plan.recompute] if plan.recompute != "none" else []
    again += [f"encoder/{schedule.recompute}"] if schedule.recompute else []
    macro_batch = f"×{schedule.macro_batch}" * (schedule.macro_batch > 1)
    shown = *(parts[name] for name in SHARES), sum(parts[name] for name in COLLECTIVES)
    return [
        f"{step:.3f}",
        f"{figures['tokens_per_second_per_gpu']:,.0f}",
        f"{figures['tflops_per_gpu']:.0f}",
        f"{figures['peak_bytes'] / GIB:.0f}",
        *(f"{part / step:.1%}" for part in shown),
        " ".join(plan.layouts.named_encoders(plan.preset.names)),
        str(plan.layouts.language),
        f"{plan.layouts.batch.micro_size}{macro_batch}",
        "+".join(again) or "-",
        plan.layouts.placement,
    ]


def figures_of(task: Task, priced: Priced) -> dict[str, float]:
    """Return throughput and peak memory; operations do not include recompute."""
    a_gpu = task.global_batch / priced.step.seconds / task.world
    return {
        "step_seconds": priced.step.seconds,
        "tokens_per_second_per_gpu": a_gpu * task.seq_length,
        "tflops_per_gpu": a_gpu * task.operations / 1e12,
        "peak_bytes": peak(priced.memory),
    }


def memory_table(plan: Plan, machine: Machine) -> str:
    """Return a table of a rank's GiB by pipeline stage and part."""
    memory = memory_of(plan, machine)
    names = list(dict.fromkeys(name for parts in memory for name in parts if parts[name]))
    rows = [["stage", *names, "sum"]]
    for stage, part in zip(stages_of_pipeline(plan.layouts), memory, strict=True):
        cells = [part.get(name, 0.0) for name in names]
        rows.append([stage.name, *map(gib, (*cells, sum(cells)))])
    return table(rows)


def gib(size: float) -> str:
    """Format bytes in GiB, with three digits, or all digits before the point."""
    return f"{size / GIB:.3g}" if size < 1000 * GIB else f"{size / GIB:.0f}"


def as_data(task: Task, found: Found, model: str) -> dict:
    """Return the plans as data for JSON."""
    plans = []
    for priced in found.best:
        plan, names = priced.plan, map(attrgetter("name"), stages_of_pipeline(priced.plan.layouts))
        layouts = asdict(plan.layouts)
        encoders = dict(zip(task.preset.names, layouts.pop("encoders"), strict=True))
        first = next(iter(encoders.values()))
        layouts |= {"encoder": first} if len(encoders) == 1 else {"encoders": encoders}
        what = layouts | {"schedule": asdict(plan.schedule)}
        what |= {"recompute": plan.recompute, "seconds": priced.step.parts}
        what["bytes"] = dict(zip(names, priced.memory, strict=True))
        plans.append(figures_of(task, priced) | what | {"command": command(task, plan, model)})
    shared = {"world": task.world, "gpus_per_node": task.machine.gpus_per_node}
    return shared | {"allowed": found.allowed, "plans": plans}
