# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plans as tables, with the command that runs the best of them."""

import shlex

from examples.mimo.common.layout import SIZES, option_of, table
from examples.mimo.nemotron_vlm.options.derived import fastest_macro_batch
from examples.mimo.nemotron_vlm.planner.inputs import words_of
from examples.mimo.nemotron_vlm.planner.memory import host_memory_of, memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, stages_of_pipeline
from examples.mimo.nemotron_vlm.planner.step_time import seconds, step_time
from megatron.training.training import num_floating_point_operations

RECOMPUTE = {
    "none": [],
    "moe": ["--recompute-granularity selective", "--recompute-modules moe"],
    "full": ["--recompute-granularity full", "--recompute-method uniform --recompute-num-layers 1"],
}
"""Options of the program, by recompute setting."""
DECIDED = """--model --device --bf16 --fp16 --seq-length --global-batch-size --placement
    --micro-batch-size --encoder --language --encoder-macro-batch
    --recompute-encoder --recompute-granularity --recompute-modules --recompute-method
    --recompute-num-layers --recompute-activations --plan --plan-gpu --plan-gpus-per-node""".split()
DECIDED += [option_of(name) for names in SIZES.values() for name in names.values()]
"""Options that a plan's command has of its own, or has not."""
GIB = 2**30
SHARES = ("bubble", "communication", "gradients")
"""Parts of a step whose shares are shown."""
HEADS = ["", "s/step", "tokens/s/GPU", "TFLOP/s", "GiB", *SHARES, "encoder", "language"]
HEADS += ["micro", "recompute", "placement"]


def command(plan: Plan) -> list[str]:
    """Return the lines of the command that runs a plan on GPUs, with all other options given."""
    world, per_node = plan.task.world, plan.task.machine.gpus_per_node
    options, batch, words, is_own = plan.task.options, plan.layouts.batch, [], True
    launch = f"torchrun --nproc-per-node {min(world, per_node)}"
    if world > per_node:
        launch += f" --nnodes {-(-world // per_node)}"
        launch += " --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:29500"
    for word in options.line.words:
        if word.startswith("--"):  # its values follow
            is_own = word.split("=")[0] not in DECIDED
        words += [word] * is_own
    return [
        f"{launch} examples/mimo/pretrain_nemotron_vlm.py",
        f"--model {options.args.model} --device cuda --bf16",
        f"--seq-length {batch.seq_length} --global-batch-size {batch.global_size}",
        *choices_of(plan),
        *[shlex.join(words)] * bool(words),
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


def describe(plans: list[Plan], allowed: int) -> str:
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
    operations = num_floating_point_operations.__wrapped__(task.options.args, 1) + sum(encoding)
    rows = [[str(number), *_row(plan, operations)] for number, plan in enumerate(plans, 1)]
    memory = f"memory of the best, GiB of a rank by pipeline stage\n{memory_table(best)}"
    run = "run it with\n" + " \\\n    ".join(command(best))
    return "\n\n".join([title, table([HEADS, *rows]), memory, run])


def _row(plan: Plan, operations: float) -> list[str]:
    """Return a plan's row of the table; a row of tokens takes ``operations``."""
    parts, step, batch = step_time(plan), seconds(plan), plan.layouts.batch
    again = [plan.recompute] * (plan.recompute != "none")
    again += [f"encoder/{plan.schedule.recompute}"] * bool(plan.schedule.recompute)
    macro_batch = f"×{plan.schedule.macro_batch}" * (plan.schedule.macro_batch > 1)
    rows_a_gpu = batch.global_size / step / plan.task.world
    return [
        f"{step:.3f}",
        f"{rows_a_gpu * batch.seq_length:,.0f}",
        f"{rows_a_gpu * operations / 1e12:.0f}",
        gib(peak(plan)),
        *(f"{parts[name] / step:.1%}" for name in SHARES),
        " ".join(plan.layouts.named_encoders(plan.task.preset.names)),
        str(plan.layouts.language),
        f"{batch.micro_size}{macro_batch}",
        "+".join(again) or "-",
        plan.layouts.placement,
    ]


def memory_table(plan: Plan) -> str:
    """Return a table of a rank's GiB by pipeline stage and part, and a line about host memory."""
    memory, hosts = memory_of(plan), host_memory_of(plan)
    names = list(dict.fromkeys(name for parts in memory for name in parts if parts[name]))
    rows = [["stage", *names, "sum"]]
    for stage, part in zip(stages_of_pipeline(plan.layouts), memory, strict=True):
        cells = [part.get(name, 0.0) for name in names]
        rows.append([stage.name, *map(gib, (*cells, sum(cells)))])
    ranks = min(plan.task.world, plan.task.machine.gpus_per_node)
    state, save = (gib(ranks * max(host[kind] for host in hosts)) for kind in ("state", "save"))
    host = f"GiB of host memory for {ranks} ranks of a node: optimizer {state}, a save {save} more"
    return f"{table(rows)}\n{host}"


def gib(size: float) -> str:
    """Format bytes in GiB, with three digits, or all digits before the point."""
    return f"{size / GIB:.3g}" if size < 1000 * GIB else f"{size / GIB:.0f}"
