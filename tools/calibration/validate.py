# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare predictions with measured steps.

    python -m calibration.validate MACHINE.json OUT.json [PICTURE.png]
    python -m calibration.validate h200 BENCH.json…

The first measures CPU ranks of this host. MACHINE.json is of ``calibrate``, which ran on one rank:
none of the layouts here has fitted it. The ranks share cores, so what is compared is the processor
time of all ranks together: waiting, and with it a pipeline's bubble, takes none. The second takes
what tools/bench/vlm.py measured on GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median

from calibration.measure import ROUNDS, busy_cores, options_of
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from examples.mimo.nemotron_vlm.planner.memory import memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, Tiles, plan_of
from examples.mimo.nemotron_vlm.planner.step_time import step_time

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES = [
    (1, "", "", 2, ""),
    (1, "", "", 4, FULL),
    (2, "dp=2", "dp=2,ep=2", 2, ""),
    (2, "tp=2", "tp=2,ep=2,etp=1", 4, ""),
    (2, "dp=2", "cp=2", 4, "--encoder-macro-batch 2"),
    (2, "dp=2", "pp=2", 2, ""),
    (2, "dp=1", "dp=1", 2, "--placement non-colocated"),
    (4, "dp=4", "dp=4", 2, ""),
    (4, "dp=4", "dp=4,ep=4", 2, ""),
    (4, "dp=4", "dp=4,ep=2", 1, ""),
    (4, "dp=4", "tp=2,pp=2", 2, ""),
    (4, "tp=4", "tp=4,ep=4,etp=1", 4, ""),
    (4, "tp=2,dp=2", "cp=2,dp=2,ep=2", 2, ""),
    (4, "dp=4", "pp=2,dp=2,vpp=2", 2, "--recompute-encoder 1"),
    (4, "dp=4", "pp=4", 2, ""),
    (4, "dp=4", "tp=2,dp=2,ep=4,etp=1", 4, ""),
    (4, "dp=2", "dp=2,ep=2", 2, "--placement non-colocated"),
]
"""Ranks, layouts of encoder and language model, samples of a microbatch, and more options."""
SAMPLES = 8
"""Of a step."""
DECIDE = [f"--{name}" for name in ("model", "num-layers", "hybrid-layer-pattern", "num-experts")]
DECIDE += [f"--{name}" for name in ("vocab-size", "seq-length", "global-batch-size")]
DECIDE += [f"--{name}" for name in ("micro-batch-size", "encoder", "language", "placement")]
DECIDE += ["--encoder-macro-batch", "--recompute-encoder", "--encoder-schedule"]
"""Options of a benchmark that decide what is predicted."""
MODEL = Path(__file__).with_name("validation_model.json")


Found = dict[str, list]
"""A case, and what each of its ranks measured."""


def arguments_of(case: tuple) -> list[str]:
    """A case as the program's command line."""
    _, encoder, language, micro, more = case
    layouts = [*(["--encoder", encoder] if encoder else [])]
    layouts += ["--language", language] if language else []
    batch = f"--global-batch-size {SAMPLES} --micro-batch-size {micro}"
    return ["--model", str(MODEL), *layouts, *batch.split(), *more.split()]


def measure(file: Path) -> list[Found]:
    """What each rank found of each case, kept in a file; cases that it has are not run again."""
    found = json.loads(file.read_text())["found"] if file.exists() else []
    done = [tuple(one["case"]) for one in found]
    for world, cases in groupby((c for c in CASES if c not in done), key=lambda case: case[0]):
        cases = list(cases)
        with tempfile.TemporaryDirectory() as directory:
            listed, written = Path(directory) / "cases.json", Path(directory) / "found.json"
            listed.write_text(json.dumps(ROUNDS * [arguments_of(case) for case in cases]))
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(world), "-m", "calibration.measure"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            with busy_cores([arguments_of(CASES[0])], world):
                subprocess.run([*launch, listed, written], check=True, env=environment)
            runs = json.loads(written.read_text())
        for number, case in enumerate(cases):
            found.append({"case": case, "ranks": _medians(runs[number :: len(cases)])})
        lines = ",\n ".join(map(json.dumps, found))
        file.write_text(f'{{"found": [\n {lines}\n]}}\n')
    return found


def _medians(runs: list[list[dict]]) -> list[dict]:
    """Of each rank the medians of what it found in several runs."""
    return [
        {key: median(one[key] for one in found) for key in found[0]}
        for found in zip(*runs, strict=True)
    ]


def benchmarked(machine: Machine, runs: list[dict]) -> list[dict]:
    """A row for each run of tools/bench/vlm.py, whose step is without the wait for data.

    Runs with CUDA graphs are left out: the machine's figures are of launches by the host.
    """
    rows = []
    for run in runs:
        words = run["arguments"]
        if "--cuda-graph-impl" in words:
            continue
        asked = [pair for pair in zip(words, words[1:], strict=False) if pair[0] in DECIDE]
        plan = plan_of(options_of([word for pair in asked for word in pair], run["ranks"]))
        data = words[len(words) - words[::-1].index("--data")] if "--data" in words else ""
        if tiles := data.partition(":")[2]:
            plan = replace(plan, images=Tiles(min(float(tiles), plan.images.mean)))
        step, held = step_time(plan, machine, 8), memory_of(plan, machine)
        rows.append(
            _row(plan, run["ranks"], f"micro {plan.layouts.batch.micro_size}")
            | {
                "seconds": {
                    "predicted": step.seconds,
                    "measured": run["step_s"] * (1 - run["data_wait"]),
                },
                "bytes": {
                    "predicted": peak(held) - machine.reserved_bytes,
                    "measured": run["peak_memory_gib"] * 2**30,
                },
            }
        )
    return rows


def _row(plan: Plan, ranks: int, options: str) -> dict:
    return {
        "ranks": ranks,
        "placement": plan.layouts.placement,
        "encoder": str(plan.layouts.encoder),
        "language": str(plan.layouts.language),
        "options": options,
    }


def compare(machine: Machine, found: list[Found]) -> list[dict]:
    """A row for each case: what was predicted and measured."""
    rows = []
    for one in found:
        case, ranks = one["case"], one["ranks"]
        plan = plan_of(options_of(arguments_of(case), case[0]))
        step = step_time(plan, machine, case[0])
        rows.append(
            _row(plan, case[0], case[4])
            | {
                "seconds": {
                    "predicted": step.work,
                    "measured": sum(rank["seconds"] for rank in ranks),
                },
                "bytes": {
                    "predicted": peak(memory_of(plan, machine)),
                    "measured": max(rank["peak_bytes"] for rank in ranks),
                },
            }
        )
    return rows


def errors(rows: list[dict], what: str) -> list[float]:
    """Relative errors of ``seconds`` or ``bytes``, where they were measured."""
    return [row[what]["predicted"] / row[what]["measured"] - 1 for row in _with(rows, what)]


def _with(rows: list[dict], what: str) -> list[dict]:
    return [row for row in rows if row[what]["measured"]]


def rank_correlation(rows: list[dict], what: str) -> float:
    """Spearman's, of predictions and measurements."""
    from scipy.stats import spearmanr

    pairs = [(row[what]["predicted"], row[what]["measured"]) for row in _with(rows, what)]
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| ranks | encoder | language | more | s: predicted | measured | error "
        "| MB: predicted | measured | error |",
        "|---:|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        more = row["options"] or "–"
        if row["placement"] not in more and row["placement"] != "colocated":
            more = f"{row['placement']} {more}"
        s, b = row["seconds"], row["bytes"]
        lines.append(
            f"| {row['ranks']} | {row['encoder']} | {row['language']} | {more} "
            f"| {s['predicted']:.2f} | {s['measured']:.2f} "
            f"| {s['predicted'] / s['measured'] - 1:+.0%} "
            + (
                f"| {b['predicted'] / 1e6:.0f} | {b['measured'] / 1e6:.0f} "
                f"| {b['predicted'] / b['measured'] - 1:+.0%} |"
                if b["measured"]
                else f"| {b['predicted'] / 1e6:.0f} | – | – |"
            )
        )
    for what in ("seconds", "bytes"):
        errs = errors(rows, what)
        lines.append(
            f"\n{what}: largest error {max(map(abs, errs)):.0%}, mean "
            f"{sum(map(abs, errs)) / len(errs):.0%}, rank correlation "
            f"{rank_correlation(rows, what):.2f}"
        )
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Predictions over measurements, with the bounds that are aimed at."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    for axes, (what, unit, scale, bound) in zip(
        both, (("seconds", "processor s", 1.0, 0.15), ("bytes", "MB", 1e6, 0.1)), strict=True
    ):
        shown = _with(rows, what)
        points = [(r[what]["measured"] / scale, r[what]["predicted"] / scale) for r in shown]
        ends = min(map(min, points)), max(map(max, points))
        axes.plot(ends, ends, color="grey", lw=0.8)
        for side in (1 - bound, 1 + bound):
            axes.plot(ends, [side * end for end in ends], color="grey", lw=0.8, ls=":")
        for row, point in zip(shown, points, strict=True):
            axes.scatter(*point, s=18, color="#1d39c4")
            axes.annotate(
                row["ranks"], point, fontsize=7, xytext=(3, 3), textcoords="offset points"
            )
        axes.set(
            xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}", xscale="log", yscale="log"
        )
        axes.set_title(f"{what} by ranks; dotted: ±{bound:.0%}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(machine: str, out: str, *more: str) -> None:
    """Compare, and print the table; on CPU ranks, measure before what OUT lacks."""
    from megatron.core import cpu_runtime

    cpu_runtime.install()
    file = Path(out)
    if not find_machine(machine).shared_cores:
        runs = [run for path in (out, *more) for run in json.loads(Path(path).read_text())["runs"]]
        print(table(benchmarked(find_machine(machine), runs)))
        return
    rows = compare(find_machine(machine), measure(file))
    print(table(rows))
    for picture in more:
        draw(rows, Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
