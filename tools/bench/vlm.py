# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train the VLM in several layouts in one go, and report how well each uses its GPUs.

A row of vlm.toml names the runs. Each run is the training program itself: three steps that do not
count, ten that do, and two under PyTorch's profiler, whose trace gives the shares of the first
GPU's time; idle is the rest of an unprofiled step after the computing kernels and the exposed
communication. Times are medians; tokens are those of whole rows, text and images; TFLOP/s are
Megatron's count for all modules, without recompute.

Usage, in the checkout's environment (PYTHONPATH):
    python tools/bench/vlm.py two-gpus --json two-gpus.json
    python tools/bench/vlm.py macro-batches --device cpu -- --seq-length 64
Options after -- are passed to the program in every run.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import draw
from machine import machine
from trace_shares import read

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

WARM_UP, MEASURED, PROFILED = 3, 10, 2
"""Steps of a run, in this order."""


def main(arguments: list[str]) -> int:
    """Carry out the runs of a row, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("row", choices=ROWS["row"])
    parser.add_argument("--device", choices=ROWS["device"], default="cuda")
    parser.add_argument("--only", metavar="RUN", action="append", help="of the row; by default all")
    parser.add_argument("--json", type=Path, help="where to write a line per run")
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, more = parser.parse_args(arguments[:place]), arguments[place + 1 :]
    row, runs = ROWS["row"][own.row], runs_of(own.row)
    common = shlex.split(f"{ROWS['device'][own.device]['arguments']} {row.get('arguments', '')}")
    found = {"row": own.row, "title": row["title"], "machine": machine(), "runs": []}
    print(draw.HEAD, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        if "pictures" in row:
            from pictures import make  # needs the extra energon

            common += make(Path(directory) / "pictures", row["pictures"], [*common, *more])
        for name, run in runs.items():
            if own.only and name not in own.only:
                continue
            command = [*common, *shlex.split(run.get("arguments", "")), *more]
            found["runs"].append({"name": name, **measured(run["ranks"], command)})
            print(draw.line(found, found["runs"][-1]), flush=True)
            if own.json:
                head = json.dumps({key: value for key, value in found.items() if key != "runs"})
                lines = ",\n".join(map(json.dumps, found["runs"]))
                own.json.write_text(f'{head[:-1]}, "runs": [\n{lines}\n]}}\n')
    return 0


def runs_of(row: str) -> dict[str, dict]:
    """Return a row's runs by name: ranks, and arguments of the program."""
    runs = ROWS["row"][row]["runs"]
    return ROWS["shared"][runs] if isinstance(runs, str) else runs


def measured(ranks: int, arguments: list[str]) -> dict[str, object]:
    """Carry out one run and return its figures; those of the profiler are None without GPUs."""
    last = WARM_UP + MEASURED
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        rest = ["--train-iters", str(last + PROFILED), "--metrics-out", str(out / "metrics.jsonl")]
        rest += ["--seed", "1", "--log-throughput", "--log-interval", "1"]
        rest += ["--log-file", str(out / "log.txt"), "--tensorboard-dir", str(out / "tensorboard")]
        rest += ["--profile", "--use-pytorch-profiler", "--profile-ranks", "0"]
        rest += ["--profile-step-start", str(last), "--profile-step-end", str(last + PROFILED)]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launch, PROGRAM, *arguments, *rest]
        checkout = os.environ.get("CHECKOUT", ROOT / "build" / "Megatron-LM")
        subprocess.run(command, check=True, cwd=checkout)
        records = list(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
        log = (out / "log.txt").read_text()
        trace = read(out / "torch_profile" / "rank-0.json.gz")
    counted = records[WARM_UP:last]
    seconds = statistics.median(record["step_time_s"] for record in counted)
    waited = sum(record["data_wait_s"] for record in counted)
    numbers = [float(n) for n in re.findall(r"throughput per GPU \(TFLOP/s/GPU\): (\S+)", log)]
    idle = None
    if trace:  # the profiler slows down launches, but not the computing kernels
        computing = (1 - trace["idle"] - trace["exposed"]) * trace["total"] / 1e6 / PROFILED
        idle = max(0.0, 1 - computing / seconds - trace["exposed"])
    memory = re.findall(r"max allocated: (\S+)", log)
    return {
        "ranks": ranks,
        "arguments": shlex.join(arguments),
        "loss": [records[0]["loss"], records[-1]["loss"]],
        "first_step_s": records[0]["step_time_s"],
        "step_s": seconds,
        "tokens_per_s_per_gpu": tokens_a_step(arguments) / seconds / ranks,
        "tflops_per_gpu": statistics.median(numbers[WARM_UP:last]),
        "peak_memory_gib": max(map(float, memory)) / 1024 if memory else None,
        "data_wait": waited / sum(record["step_time_s"] for record in counted),
        "idle": idle,
        **{name: trace.get(name) for name in ("exposed", "bridge", "optimizer")},
    }


def tokens_a_step(arguments: list[str]) -> int:
    """Return the tokens of all rows of a global batch."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--global-batch-size", type=int)
    sizes, _ = parser.parse_known_args(arguments)
    return sizes.seq_length * sizes.global_batch_size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
