# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure how well the training program uses its GPUs in the runs of a row of vlm.toml.

A run is the program itself, or upstream's script that it is compared with: three steps that do not
count and ten that do. Times are medians; tokens are of whole rows, text and images; TFLOP/s
are Megatron's count for all modules, without recompute.

Usage, in the checkout's environment (PYTHONPATH):
    python tools/bench/vlm.py real --json docs/benchmarks/real.json
    python tools/bench/vlm.py macro-batches --device cpu -- --seq-length 64
    python tools/bench/vlm.py tables          # of docs/benchmarks/*.json, into the pages
Options after -- are passed to the program in every run.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import tables
from machine import machine

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

WARM_UP, MEASURED = 3, 10
"""Steps of a run, in this order; a row may have more `measured` ones."""


def main(arguments: list[str]) -> int:
    """Carry out the runs of a row, print a table and write the JSON; or write the pages' tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("row", choices=[*ROWS["row"], "tables"])
    parser.add_argument("--device", choices=ROWS["device"], default="cuda")
    parser.add_argument("--only", metavar="RUN", action="append", help="beside the row's first")
    parser.add_argument("--json", type=Path, help="where to write a line per run")
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, more = parser.parse_args(arguments[:place]), arguments[place + 1 :]
    if own.row == "tables":
        tables.write()
        return 0
    row = ROWS["row"][own.row]
    common = shlex.split(f"{ROWS['device'][own.device]['arguments']} {row.get('arguments', '')}")
    head = {"row": own.row, "title": row["title"], "machine": machine()}
    print(tables.head(tables.PRINTED), flush=True)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        if "mixture" in row:
            from mixture import make  # needs the extra energon

            common += make(Path(directory) / "mixture", row["mixture"], [*common, *more])
        if "tile" in row:
            common += ["--model", _with_tile(row["tile"], Path(directory))]
        for name, run in runs_of(row).items():
            if own.only and name not in own.only and found:
                continue
            arguments = shlex.split(run["arguments"])
            if "script" in run:
                arguments += ["--img-h", str(row["tile"]), "--img-w", str(row["tile"]), *more]
                figures = measured_upstream(run, arguments, found[0])
            else:
                steps = row.get("measured", MEASURED)
                figures = measured(run["ranks"], [*common, *arguments, *more], steps)
            found.append({"name": name, **figures})
            print(tables.line(found[-1], found[0]), flush=True)
            if own.json:
                lines = ",\n".join(map(json.dumps, found))
                own.json.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')
    return 0


def runs_of(row: dict) -> dict[str, dict]:
    """Return a row's runs by name; the arguments of a run follow those of the run `like` it."""
    found = {}
    for name, run in row["runs"].items():
        base = found.get(run.get("like"), {"arguments": ""})
        words = f"{base['arguments']} {run.get('arguments', '')}"
        found[name] = {**base, **run, "arguments": words}
    return found


def torchrun(ranks: int) -> list[str]:
    """Return the command line's part that starts a program's ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *launch]


def measured(ranks: int, arguments: list[str], steps: int) -> dict[str, object]:
    """Carry out one run, with ``steps`` counted after the warm-up, and return its figures."""
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory, "metrics.jsonl")
        rest = ["--train-iters", str(WARM_UP + steps), "--metrics-out", str(metrics)]
        command = [*torchrun(ranks), PROGRAM, *arguments, *rest, "--seed", "1"]
        checkout = os.environ.get("CHECKOUT", ROOT / "build" / "Megatron-LM")
        subprocess.run(command, check=True, cwd=checkout)
        records = list(map(json.loads, metrics.read_text().splitlines()))
    if skipped := sum(record["skipped"] for record in records):
        raise SystemExit(f"{skipped} of {len(records)} steps were skipped: bad gradients")
    counted = records[WARM_UP:]
    seconds = statistics.median(record["step_time_s"] for record in counted)
    waited = sum(record["data_wait_s"] for record in counted)
    return {
        "ranks": ranks,
        "arguments": shlex.join(arguments),
        "loss": [records[0]["loss"], records[-1]["loss"]],
        "first_step_s": records[0]["step_time_s"],
        "step_s": seconds,
        "tokens_per_s_per_gpu": tokens_a_step(arguments) / seconds / ranks,
        "tflops_per_gpu": statistics.median(record["tflops"] for record in counted),
        "peak_memory_gib": records[-1]["memory_gib"] or None,
        "data_wait": waited / sum(record["step_time_s"] for record in counted),
    }


def measured_upstream(run: dict, arguments: list[str], ours: dict) -> dict[str, object]:
    """Carry out a run of upstream's script and return its figures.

    Args:
        run: `script` is the script's path in the git checkout that ``MEGATRON_GIT_CHECKOUT`` names.
        ours: a run of the same model and batch, whose operations are the script's.
    """
    ranks, checkout = run["ranks"], os.environ["MEGATRON_GIT_CHECKOUT"]
    with tempfile.TemporaryDirectory() as directory:
        rest = ["--train-iters", str(WARM_UP + MEASURED), "--seed", "1"]
        program = [str(Path(__file__).with_name("upstream.py")), directory, run["script"]]
        paths = os.pathsep.join([checkout, os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [*torchrun(ranks), *program, *arguments, *rest],
            check=True,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": paths, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )
        files = Path(directory).glob("*.jsonl")
        steps = [list(map(json.loads, file.read_text().splitlines())) for file in files]
    counted = zip(*(rank[WARM_UP:] for rank in steps), strict=True)
    seconds = statistics.median(max(rank["step_time_s"] for rank in step) for step in counted)
    losses = next(rank for rank in steps if rank[0]["losses"])
    scale = ours["step_s"] * ours["ranks"] / seconds / ranks
    return {
        "ranks": ranks,
        "arguments": shlex.join([run["script"], *arguments]),
        "loss": [next(iter(losses[at]["losses"].values())) for at in (0, -1)],
        "first_step_s": max(rank[0]["step_time_s"] for rank in steps),
        "step_s": seconds,
        "tokens_per_s_per_gpu": ours["tokens_per_s_per_gpu"] * scale,
        "tflops_per_gpu": ours["tflops_per_gpu"] * scale,
        "peak_memory_gib": max(rank[-1]["peak_memory_gib"] for rank in steps),
        "data_wait": None,
    }


def _with_tile(tile: int, directory: Path) -> str:
    """Write the sizes of a model with tiles of ``tile`` pixels a side; return the file's path."""
    from examples.mimo.nemotron_vlm.model.presets import find_preset, write_preset

    preset = find_preset("nano-vl-30b-a3b")
    path = directory / f"tile-{tile}.json"
    write_preset(replace(preset, encoders=(replace(preset.images, tile=tile),)), path)
    return str(path)


def tokens_a_step(arguments: list[str]) -> int:
    """Return the tokens of all rows of a global batch."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--global-batch-size", type=int)
    sizes, _ = parser.parse_known_args(arguments)
    return sizes.seq_length * sizes.global_batch_size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
