# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare predictions with measured runs of the training program.

No machine is fitted to any of these runs, which tools/bench/vlm.py measures.
"""

import json
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from scipy.stats import spearmanr

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import table
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.planner.inputs import Inputs
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.memory import memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, plan_of, split_words
from examples.mimo.nemotron_vlm.planner.step_time import step_time

DECIDE = """--device --bf16 --model --num-layers --hybrid-layer-pattern --num-experts --vocab-size
    --seq-length --global-batch-size --micro-batch-size --encoder --language --placement
    --encoder-macro-batch --encoder-schedule --recompute-encoder --recompute-granularity
    --recompute-method --recompute-num-layers --freeze --use-precision-aware-optimizer
    --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
    --grad-reduce-in-bf16 --optimizer-cpu-offload --optimizer-offload-fraction""".split()
"""Options that change the prediction."""


def read(file: Path) -> list[dict]:
    """Return the runs of a file.

    Raises:
        UserError: it has none that can be compared.
    """
    try:
        runs = json.loads(file.read_text())["runs"]
        [run["arguments"] + str(run["step_s"]) for run in runs]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file}: not a file of tools/bench/vlm.py") from error
    return runs


def compare(machine: Machine, runs: list[dict]) -> list[dict]:
    """Return a row for each run, with prediction and measurement; waiting for data is left out.

    Runs with CUDA graphs or FP8 are left out, as the machine's figures are for launches by the
    host, in bf16; so are those of upstream's script.
    """
    rows = []
    for run in runs:
        left_out = ("--cuda-graph-impl", "--fp8-format", "pretrain_mimo.py")
        if any(word in run["arguments"] for word in left_out):
            continue
        plan = planned(shlex.split(run["arguments"]), run["ranks"])
        step, memory = step_time(plan, machine), peak(memory_of(plan, machine))
        seconds = {"predicted": step.seconds}
        seconds["measured"] = run["step_s"] * (1 - run["data_wait"])
        tensors = {"predicted": memory - machine.reserved_bytes}
        tensors["measured"] = run["peak_memory_gib"] * 2**30
        lay = plan.layouts
        shown = {"ranks": run["ranks"], "micro": lay.batch.micro_size}
        shown |= {"encoder": str(lay.encoder), "language": str(lay.language)}
        rows.append(shown | {"seconds": seconds, "bytes": tensors})
    return rows


def planned(words: list[str], ranks: int) -> Plan:
    """Return the plan of a command line, on any host; ``--data digits:N`` has N tiles a sample."""
    pairs = list(zip(words, words[1:], strict=False))
    asked = ["--dry-run", str(ranks), "--encoder-macro-batch", "1"]  # once its default on GPUs
    asked += split_words(words, DECIDE)[0]
    with redirect_stdout(None):  # Megatron prints its arguments
        plan = plan_of(parse(asked, ranks))
    of_data = [value.partition(":")[2] for name, value in pairs if name == "--data"]
    if of_data and of_data[-1]:
        (most,) = plan.inputs
        plan = replace(plan, inputs=(Inputs(min(float(of_data[-1]), most.mean)),))
    return plan


def errors(rows: list[dict], what: str) -> list[float]:
    """Return the relative errors of ``seconds`` or ``bytes``."""
    return [row[what]["predicted"] / row[what]["measured"] - 1 for row in rows]


def rank_correlation(rows: list[dict], what: str) -> float:
    """Return Spearman's rank correlation of predictions and measurements."""
    pairs = [row[what].values() for row in rows]
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def describe(rows: list[dict]) -> str:
    """Return the rows as a table, and a line about the errors of time and of memory."""
    units = {"seconds": ("s", 1.0, ".2f"), "bytes": ("MB", 1e6, ",.0f")}
    names = ["ranks", "encoder", "language", "micro"]
    heads = [[f"{unit}: predicted", "measured", "error"] for unit, *_ in units.values()]
    lines, summary = [[*names, *heads[0], *heads[1]]], ""
    for row in rows:
        lines.append([row[name] for name in names])
        for what, (_, scale, form) in units.items():
            lines[-1] += [f"{n / scale:{form}}" for n in row[what].values()]
            lines[-1] += [f"{error:+.0%}" for error in errors([row], what)]
    for what in units:
        found = list(map(abs, errors(rows, what)))
        mean, correlation = sum(found) / len(found), rank_correlation(rows, what)
        summary += f"\n{what}: largest error {max(found):.0%}, mean {mean:.0%}, "
        summary += f"rank correlation {correlation:.2f}"
    return table(lines) + summary
