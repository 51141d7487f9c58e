# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare predictions with measured steps.

    python -m calibration.validate here MACHINE.json OUT.json [PICTURE.png]
    python -m calibration.validate benchmarks MACHINE BENCH.json…

The first measures this host and predicts with ``calibrate``'s file of it, which was fitted to none
of these runs. CPU ranks share cores, so the processor time of all ranks together is compared:
waiting, and with it a pipeline's bubble, takes none. The second compares with measurements of
tools/bench/vlm.py on GPUs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from statistics import median

import torch

from calibration.cases import ON_CPU, ON_GPU, arguments_of, planned
from calibration.measure import ROUNDS, busy_cores
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from examples.mimo.nemotron_vlm.planner.memory import memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.step_time import step_time

GPUS_PER_NODE = 8
Found = dict[str, list]
"""A case, and what each of its ranks measured."""


def measure(file: Path, on_gpu: bool) -> list[Found]:
    """Return each rank's measurements of all cases; those in the file are not run again."""
    found = json.loads(file.read_text())["found"] if file.exists() else []
    done = [tuple(one["case"]) for one in found]
    cases = [case for case in (ON_GPU if on_gpu else ON_CPU) if case not in done]
    for world, same in groupby(cases, key=lambda case: case[0]):
        if on_gpu and world > torch.cuda.device_count():
            print(f"left out: runs on {world} GPUs", file=sys.stderr)
            continue
        found += _measured(list(same), world, on_gpu)
        lines = ",\n ".join(map(json.dumps, found))
        file.write_text(f'{{"found": [\n {lines}\n]}}\n')
    return found


def _measured(cases: list[tuple], world: int, on_gpu: bool) -> list[Found]:
    lines = [arguments_of(case, on_gpu) for case in cases]
    rounds, others = (1, nullcontext()) if on_gpu else (ROUNDS, busy_cores(lines[:1], world))
    with tempfile.TemporaryDirectory() as directory:
        listed, written = Path(directory) / "cases.json", Path(directory) / "found.json"
        listed.write_text(json.dumps(rounds * lines))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(world), "-m", "calibration.measure"]
        environment = os.environ | ({} if on_gpu else {"OMP_NUM_THREADS": "1"})
        with others:
            subprocess.run([*launch, listed, written], check=True, env=environment)
        runs = json.loads(written.read_text())
    return [
        {"case": case, "ranks": _medians(runs[number :: len(cases)])}
        for number, case in enumerate(cases)
    ]


def _medians(runs: list[list[dict]]) -> list[dict]:
    """Return the medians of each rank's measurements over several runs."""
    return [
        {key: median(one[key] for one in found) for key in found[0]}
        for found in zip(*runs, strict=True)
    ]


def benchmarked(machine: Machine, runs: list[dict]) -> list[dict]:
    """Return a row for each run of tools/bench/vlm.py; its step does not include waiting for data.

    Runs with CUDA graphs are left out: the machine's figures are for launches by the host.
    """
    return [
        _row(
            machine,
            planned(shlex.split(run["arguments"]), run["ranks"]),
            run["ranks"],
            "",
            run["step_s"] * (1 - run["data_wait"]),
            run["peak_memory_gib"] * 2**30,
        )
        for run in runs
        if "--cuda-graph-impl" not in run["arguments"]
    ]


def compare(machine: Machine, found: list[Found]) -> list[dict]:
    """Return a row for each case, with prediction and measurement."""
    on_gpu = not machine.shared_cores
    rows = []
    for one in found:
        case, ranks = one["case"], one["ranks"]
        seconds = [rank["seconds"] for rank in ranks]
        rows.append(
            _row(
                machine,
                planned(arguments_of(case, on_gpu), case[0]),
                case[0],
                case[4],
                max(seconds) if on_gpu else sum(seconds),
                max(rank["peak_bytes"] for rank in ranks),
            )
        )
    return rows


def _row(
    machine: Machine, plan: Plan, ranks: int, options: str, seconds: float, peak_bytes: float
) -> dict:
    """Return the row of a run, with prediction and measurement."""
    step = step_time(plan, machine, min(ranks, GPUS_PER_NODE))
    predicted = step.work if machine.shared_cores else step.seconds
    held = peak(memory_of(plan, machine)) - machine.reserved_bytes
    return {
        "ranks": ranks,
        "placement": plan.layouts.placement,
        "encoder": str(plan.layouts.encoder),
        "language": str(plan.layouts.language),
        "options": f"micro {plan.layouts.batch.micro_size} {options}".strip(),
        "seconds": {"predicted": predicted, "measured": seconds},
        "bytes": {"predicted": held, "measured": peak_bytes},
    }


def errors(rows: list[dict], what: str) -> list[float]:
    """Return the relative errors of ``seconds`` or ``bytes``, where they were measured."""
    return [row[what]["predicted"] / row[what]["measured"] - 1 for row in _with(rows, what)]


def _with(rows: list[dict], what: str) -> list[dict]:
    return [row for row in rows if row[what]["measured"]]


def rank_correlation(rows: list[dict], what: str) -> float:
    """Return Spearman's rank correlation of predictions and measurements."""
    from scipy.stats import spearmanr

    pairs = [(row[what]["predicted"], row[what]["measured"]) for row in _with(rows, what)]
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def _units(rows: list[dict]) -> dict[str, tuple[str, float]]:
    """Return the units in which seconds and bytes are shown, and their sizes."""
    large = max(row["bytes"]["predicted"] for row in rows) > 10e9
    return {"seconds": ("s", 1.0), "bytes": ("GB", 1e9) if large else ("MB", 1e6)}


def table(rows: list[dict]) -> str:
    """Return the rows as a table in Markdown."""
    unit, scale = _units(rows)["bytes"]
    lines = [
        "| ranks | encoder | language | more | s: predicted | measured | error "
        f"| {unit}: predicted | measured | error |",
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
                f"| {b['predicted'] / scale:.4g} | {b['measured'] / scale:.4g} "
                f"| {b['predicted'] / b['measured'] - 1:+.0%} |"
                if b["measured"]
                else f"| {b['predicted'] / scale:.4g} | – | – |"
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
    """Draw predictions against measurements, with the error bounds aimed at."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    units = _units(rows)
    for axes, what, bound in zip(both, units, (0.15, 0.1), strict=True):
        unit, scale = units[what]
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


def here(machine: str, out: str, *pictures: str) -> list[dict]:
    """Measure the cases that OUT lacks, and return the rows of all."""
    of_this = find_machine(machine)
    rows = compare(of_this, measure(Path(out), not of_this.shared_cores))
    for picture in pictures:
        draw(rows, Path(picture))
    return rows


def benchmarks(machine: str, *files: str) -> list[dict]:
    """Return the rows of the runs of tools/bench/vlm.py in these files."""
    runs = [run for file in files for run in json.loads(Path(file).read_text())["runs"]]
    return benchmarked(find_machine(machine), runs)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        from megatron.core import cpu_runtime

        cpu_runtime.install()
    print(table({"here": here, "benchmarks": benchmarks}[sys.argv[1]](*sys.argv[2:])))
