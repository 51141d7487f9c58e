# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train the VLM in several layouts in one go, and report how well each uses its GPUs.

A row of vlm.toml names the runs. A run is the training program itself, or upstream's script that it
is compared with: three steps that do not count and ten that do. The program has two more under
PyTorch's profiler, whose trace gives the shares of the first GPU's time; idle is the rest of an
unprofiled step after the computing kernels and the exposed communication, with its waits for data.
Times are medians; tokens are those of whole rows, text and images; TFLOP/s are Megatron's count for
all modules, without recompute.

Usage, in the checkout's environment (PYTHONPATH):
    python tools/bench/vlm.py two-gpus --json two-gpus.json
    python tools/bench/vlm.py macro-batches --device cpu -- --seq-length 64
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

import draw
from machine import machine
from trace_shares import RANGES, read

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
        for kind in {"pictures", "mixture"} & row.keys():
            from pictures import make  # needs the extra energon

            common += make(Path(directory) / kind, kind, row[kind], [*common, *more])
        if "tile" in row:
            common += ["--model", _with_tile(row["tile"], Path(directory))]
        for name, run in runs.items():
            if own.only and name not in own.only:
                continue
            arguments = shlex.split(run.get("arguments", ""))
            if "script" in run:
                if not found["runs"]:
                    first = next(iter(runs))
                    parser.error(f"{name!r} is compared with this program: add --only {first!r}")
                arguments += ["--img-h", str(row["tile"]), "--img-w", str(row["tile"]), *more]
                figures = measured_upstream(run, arguments, found["runs"][0])
            else:
                figures = measured(run["ranks"], [*common, *arguments, *more])
            found["runs"].append({"name": name, **figures})
            print(draw.line(found, found["runs"][-1]), flush=True)
            if own.json:
                head = json.dumps({key: value for key, value in found.items() if key != "runs"})
                lines = ",\n".join(map(json.dumps, found["runs"]))
                own.json.write_text(f'{head[:-1]}, "runs": [\n{lines}\n]}}\n')
    return 0


def runs_of(row: str) -> dict[str, dict]:
    """Return a row's runs by name; the arguments of a run follow those of the run `like` it."""
    runs = ROWS["row"][row]["runs"]
    runs = ROWS["shared"][runs] if isinstance(runs, str) else runs
    found = {}
    for name, run in runs.items():
        base = runs.get(run.get("like"), {})
        words = f"{base.get('arguments', '')} {run.get('arguments', '')}"
        found[name] = {**base, **run, "arguments": words}
    return found


def torchrun(ranks: int) -> list[str]:
    """Return the command line's part that starts so many ranks of a program."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *launch]


def measured(ranks: int, arguments: list[str]) -> dict[str, object]:
    """Carry out one run and return its figures; those of the profiler are None without GPUs."""
    last = WARM_UP + MEASURED
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        rest = ["--train-iters", str(last + PROFILED), "--metrics-out", str(out / "metrics.jsonl")]
        rest += ["--seed", "1", "--tensorboard-dir", str(out / "tensorboard")]
        rest += ["--profile", "--use-pytorch-profiler", "--profile-ranks", "0"]
        rest += ["--profile-step-start", str(last), "--profile-step-end", str(last + PROFILED)]
        given = [word.replace("{out}", directory) for word in arguments]
        command = [*torchrun(ranks), PROGRAM, *given, *rest]
        checkout = os.environ.get("CHECKOUT", ROOT / "build" / "Megatron-LM")
        subprocess.run(command, check=True, cwd=checkout)
        records = list(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
        trace = read(out / "torch_profile" / "rank-0.json.gz")
        saved = sizes_of_saves(out / "saved")
    if skipped := sum(record["skipped"] for record in records):
        raise SystemExit(f"{skipped} of {len(records)} steps were skipped: bad gradients")
    counted = records[WARM_UP:last]
    seconds = statistics.median(record["step_time_s"] for record in counted)
    waited = sum(record["data_wait_s"] for record in counted)
    idle = None
    if trace:  # the profiler slows down launches, but not kernels
        busy = (1 - trace["idle"]) * trace["total"] / 1e6 / PROFILED
        idle = max(0.0, 1 - busy / seconds)
    paused = sum(record["pause_s"] for record in records)
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
        "idle": idle,
        # An asynchronous save holds steps up as it begins, and as it is made known. After the last
        # save there is no step.
        "save_gb": saved[0] if saved else None,
        "pause_s_per_gb": paused / sum(saved[:-1]) if saved[1:] else None,
        **{name: trace.get(name) for name in (*RANGES, "exposed", "kernels", "gaps")},
    }


def sizes_of_saves(directory: Path) -> list[float]:
    """Return the GB of each of a run's checkpoints."""
    return [
        sum(file.stat().st_size for file in checkpoint.iterdir()) / 1e9
        for checkpoint in sorted(directory.glob("iter_*"))
    ]


def measured_upstream(run: dict, arguments: list[str], ours: dict) -> dict[str, object]:
    """Carry out a run of upstream's script and return its figures, without a profile.

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
    seconds = statistics.median(max(s) for s in zip(*map(_seconds, steps), strict=True))
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
        **dict.fromkeys(("data_wait", "idle", "exposed", *RANGES, "kernels", "gaps")),
    }


def _seconds(steps: list[dict]) -> list[float]:
    return [step["step_time_s"] for step in steps[WARM_UP:]]


def _with_tile(tile: int, directory: Path) -> str:
    """Write the sizes of the model with tiles of so many pixels a side; returns the file's path."""
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
