# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plans as a table and as data, with the command that runs the best of them."""

from __future__ import annotations

from dataclasses import asdict

from examples.mimo.common.layout import table
from examples.mimo.nemotron_vlm.loop.encoder_schedule import BUBBLES, fastest_macro_batch
from examples.mimo.nemotron_vlm.planner.layers import operations_of_sample
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
GIB = 2**30
HEADS = ["", "s/step", "tokens/s/GPU", "TFLOP/s", "GiB", "bubble", "bridge", "all-to-all"]
HEADS += ["other comm.", "encoder", "language", "micro", "recompute", "placement"]
COLLECTIVES = ("tensor", "context", "gradients")
"""Parts of a step shown as one column; the experts' collectives and the bridge have their own."""


def command(task: Task, plan: Plan, model: str) -> list[str]:
    """Return the lines of the command that runs a plan."""
    per_node = task.machine.gpus_per_node
    nodes = -(-task.world // per_node)
    launch = f"torchrun --nproc-per-node {min(task.world, per_node)}"
    if nodes > 1:
        launch += f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:29500"
    return [f"{launch} examples/mimo/pretrain_nemotron_vlm.py", *options_of(plan, model)]


def options_of(plan: Plan, model: str) -> list[str]:
    """Return the program's options for a plan on GPUs."""
    lay, batch = plan.layouts, plan.layouts.batch
    encoders = [f"--encoder {text}" for text in lay.named_encoders(plan.preset.names)]
    options = [
        f"--model {model} --device cuda --bf16 --placement {lay.placement}",
        " ".join([*encoders, f"--language {lay.language}"]),
        f"--seq-length {batch.seq_length} --global-batch-size {batch.global_size} "
        f"--micro-batch-size {batch.micro_size}",
        *RECOMPUTE[plan.recompute],
    ]
    if plan.in_bubbles:
        options.append(f"--encoder-schedule {BUBBLES}")
    if max(plan.macro_batch, fastest_macro_batch(lay, plan.in_bubbles)) > 1:
        options.append(f"--encoder-macro-batch {plan.macro_batch}")
    if plan.recompute_encoder:
        options.append(f"--recompute-encoder {plan.recompute_encoder}")
    return options


def describe(task: Task, found: Found, model: str) -> str:
    """Return everything that is printed about the plans found."""
    machine, best, deviation = task.machine, found.best[0], task.images.deviation
    images = f"{task.images.mean:g}" + f"±{deviation:.1f}" * bool(deviation)
    title = (
        f"{task.preset.name} on {task.world} GPUs, {machine.gpus_per_node} a node: "
        f"{task.seq_length} tokens and {images} tiles a sample, global batch {task.global_batch}\n"
        f"the best that fit {machine.memory_bytes / 1e9:.0f} GB of {found.allowed} plans; "
        f"{machine.source}"
    )
    memory = memory_table(best.plan, machine)
    return "\n\n".join(
        [
            title,
            table([HEADS, *(_row(n, task, p) for n, p in enumerate(found.best, 1))]),
            _why(found.best),
            f"memory of the best, GiB of a rank by pipeline stage\n{memory}",
            "run it with\n" + " \\\n    ".join(command(task, best.plan, model)),
        ]
    )


def _row(number: int, task: Task, priced: Priced) -> list[str]:
    figures, plan = figures_of(task, priced), priced.plan
    step, parts = priced.step.seconds, priced.step.parts
    again = [plan.recompute] if plan.recompute != "none" else []
    again += [f"encoder/{plan.recompute_encoder}"] if plan.recompute_encoder else []
    micro = str(plan.layouts.batch.micro_size) + (f"×{plan.macro_batch}" * (plan.macro_batch > 1))
    others = sum(parts[name] for name in COLLECTIVES)
    return [
        str(number),
        f"{step:.3f}",
        f"{figures['tokens_per_second_per_gpu']:,.0f}",
        f"{figures['tflops_per_gpu']:.0f}",
        f"{figures['peak_bytes'] / GIB:.0f}",
        *(f"{part / step:.1%}" for part in (parts["bubble"], parts["bridge"], parts["experts"])),
        f"{others / step:.1%}",
        " ".join(plan.layouts.named_encoders(plan.preset.names)),
        str(plan.layouts.language),
        micro,
        "+".join(again) or "-",
        plan.layouts.placement,
    ]


def figures_of(task: Task, priced: Priced) -> dict[str, float]:
    """Return throughput and peak memory; operations do not include recompute."""
    step = priced.step.seconds * task.world
    work = operations_of_sample(task.preset, task.seq_length, task.images.mean) * task.global_batch
    return {
        "step_seconds": priced.step.seconds,
        "tokens_per_second_per_gpu": task.global_batch * task.seq_length / step,
        "tflops_per_gpu": work / step / 1e12,
        "peak_bytes": peak(priced.memory),
    }


def _why(best: list[Priced]) -> str:
    """Explain why each next plan is slower: the parts that grow most against the best plan."""
    first = best[0].step
    largest = sorted(first.parts.items(), key=lambda part: -part[1])[:4]
    shares = ", ".join(f"{name} {seconds / first.seconds:.0%}" for name, seconds in largest)
    lines = [f"why the next ones lose to 1 ({shares})"]
    for number, priced in enumerate(best[1:], 2):
        parts = priced.step.parts
        grown = sorted(((parts[name] - first.parts[name], name) for name in parts), reverse=True)
        more = ", ".join(f"{name} +{by:.3f} s" for by, name in grown[:2] if by > 5e-4)
        less = min((by, name) for by, name in grown)
        gain = f"; {less[1]} {less[0]:.3f} s" if less[0] < -5e-4 else ""
        lines.append(f"{number:2}  +{priced.step.seconds - first.seconds:.3f} s: {more}{gain}")
    return "\n".join(lines)


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
        plan = asdict(priced.plan)
        layouts = plan.pop("layouts")
        encoders = dict(zip(task.preset.names, layouts.pop("encoders"), strict=True))
        first = next(iter(encoders.values()))
        layouts |= {"encoder": first} if len(encoders) == 1 else {"encoders": encoders}
        of_stages = zip(stages_of_pipeline(priced.plan.layouts), priced.memory, strict=True)
        plans.append(
            figures_of(task, priced)
            | {name: plan[name] for name in plan if name not in ("preset", "images", "imbalance")}
            | layouts
            | {
                "seconds": priced.step.parts,
                "bytes": {stage.name: parts for stage, parts in of_stages},
                "command": command(task, priced.plan, model),
            }
        )
    shared = {"world": task.world, "gpus_per_node": task.machine.gpus_per_node}
    return shared | {"allowed": found.allowed, "plans": plans}
