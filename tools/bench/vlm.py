# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure how well the training program uses its GPUs in the runs of a row of vlm.toml.

A run is the program itself, or upstream's script that it is compared with: some steps that do not
count, three in most rows, and ten that do. Times are medians; tokens are of whole rows, text and
images; TFLOP/s are Megatron's count for all modules, without recompute.

Usage, in the checkout's environment (PYTHONPATH):
    python tools/bench/vlm.py real --json docs/benchmarks/real.json
    python tools/bench/vlm.py macro-batches --device cpu -- --seq-length 64
    python tools/bench/vlm.py tables          # of docs/benchmarks/*.json, into the pages
Options after -- are passed to the program in every run.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import tables
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

WARM_UP, MEASURED = 3, 10
"""Steps of a run, in this order; a row may have other numbers."""

PACKAGES = ("torch", "transformer_engine", "megatron-core", "mamba-ssm", "triton")
"""Packages whose versions are recorded."""


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
            words = [*([] if "script" in run else common), *shlex.split(run["arguments"]), *more]
            steps = row.get("warm_up", WARM_UP), row.get("measured", MEASURED)
            figures = measured(run, words, *steps, *found[:1])
            found.append({"name": name, **figures})
            print(tables.line(found[-1], found[0]), flush=True)
            if own.json:
                lines = ",\n".join(map(json.dumps, found))
                own.json.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')
    return 0


def machine() -> dict[str, object]:
    """Return the names of GPUs and processor, and the versions of installed packages."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    gpus = [f"{gpu.name}, {gpu.multi_processor_count} multiprocessors" for gpu in found]
    return {"gpus": gpus, "cpu": platform.processor(), "versions": versions}


def runs_of(row: dict) -> dict[str, dict]:
    """Return a row's runs by name; the arguments of a run follow those of the run `like` it."""
    found = {}
    for name, run in row["runs"].items():
        base = found.get(run.get("like"), {"arguments": ""})
        words = f"{base['arguments']} {run.get('arguments', '')}"
        found[name] = {**base, **run, "arguments": words}
    return found


def measured(
    run: dict, arguments: list[str], warm_up: int, steps: int, first: dict | None = None
) -> dict:
    """Carry out one run, with ``steps`` counted after the warm-up, and return its figures.

    Args:
        run: its `ranks`; and `script`, if it is upstream's, the script's path in the git checkout
            that ``MEGATRON_GIT_CHECKOUT`` names.
        first: the row's first run, whose operations a script of the same model and batch has, too.
    """
    ranks, program = run["ranks"], [PROGRAM]
    checkout = os.environ.get("CHECKOUT", ROOT / "build" / "Megatron-LM")
    environment = dict(os.environ)
    if "script" in run:
        program = [str(Path(__file__).with_name("upstream.py")), run["script"]]
        checkout = os.environ["MEGATRON_GIT_CHECKOUT"]
        environment["PYTHONPATH"] = f"{checkout}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory, "metrics.jsonl")
        rest = ["--train-iters", str(warm_up + steps), "--seed", "1", "--metrics-out", str(metrics)]
        command = [sys.executable, *launch, *program, *arguments, *rest]
        subprocess.run(command, check=True, cwd=checkout, env=environment)
        records = list(map(json.loads, metrics.read_text().splitlines()))
    if skipped := sum(record["skipped"] for record in records):
        raise SystemExit(f"{skipped} of {len(records)} steps were skipped: bad gradients")
    counted = records[warm_up:]
    seconds = statistics.median(record["step_time_s"] for record in counted)
    if "script" in run:
        tflops = first["tflops_per_gpu"] * first["step_s"] * first["ranks"] / seconds / ranks
        waited = None
    else:
        tflops = statistics.median(record["tflops"] for record in counted)
        times = sum(record["step_time_s"] for record in counted)
        waited = sum(record["data_wait_s"] for record in counted) / times
    return {
        "ranks": ranks,
        "arguments": shlex.join([*program[1:], *arguments]),
        "loss": [records[0]["loss"], records[-1]["loss"]],
        "first_step_s": records[0]["step_time_s"],
        "step_s": seconds,
        "tokens_per_s_per_gpu": tokens_a_step(arguments) / seconds / ranks,
        "tflops_per_gpu": tflops,
        "peak_memory_gib": records[-1]["memory_gib"] or None,
        "data_wait": waited,
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
