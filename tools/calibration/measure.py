# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure short runs of the training program on a GPU of this host, and collectives on two.

``torchrun -m calibration.measure FILE [ARGUMENTS…]`` is what is started: a run of the program, or
without its arguments the collectives. Rank 0 writes what it measured.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.loop.run import close_session, open_session, train
from examples.mimo.nemotron_vlm.options.arguments import Options, parse

STEPS, WARM_UP = 10, 2
"""Steps of a run, and how many of the first ones are not timed."""
ROUNDS = 3
"""Times that the collectives are timed; the median counts."""
SIZES = (2**12, 2**26)
"""Approximate bytes of the collectives, of which few give the latency and many the bandwidth."""
REPEATS, MATRIX = 50, 512
"""Collectives in a row, and rows of the matrices multiplied before each, as training has it."""

OF_RANKS = dict(os.environ)
"""Environment of the ranks; tools/calibrate.py, which only predicts, has no GPU in its own."""

Figures = dict[str, float]
"""Figures of a run: ``seconds`` of its fastest step, ``peak_bytes`` of tensors."""


def measure_runs(lines: list[list[str]]) -> list[Figures | None]:
    """Run the program's command lines on one rank; return the figures of each.

    A line that fails says why on stderr, and has no figures.
    """
    found = []
    for line in lines:
        found.append(_started(line, ranks=1))
        if found[-1]:
            text = f"{found[-1]['seconds']:.4f} s, {found[-1]['peak_bytes'] / 1e9:.2f} GB"
            print(f"{' '.join(line)}: {text}", file=sys.stderr, flush=True)
    return found


def measure_collectives() -> list[dict]:
    """Time collectives between two GPUs of this host, if it has them."""
    return _started([], ranks=2) or []


def _started(line: list[str], ranks: int) -> Any:
    """Start ranks; return what the first one measured, None if they failed."""
    environment = OF_RANKS | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(ranks), "-m", "calibration.measure"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "measured.json"
        subprocess.run([*launch, file, *line], env=environment)
        return json.loads(file.read_text()) if file.exists() else None


def main(file: str, *arguments: str) -> None:
    """Measure on this rank; rank 0 writes what it measured."""
    found = measured(options_of(list(arguments))) if arguments else _timed_collectives()
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()


def options_of(arguments: list[str], world: int | None = None) -> Options:
    """Parse the program's options for a short run, on mock data unless arguments differ."""
    run = ["--data", "mock", "--train-iters", str(STEPS), "--log-interval", "1000"]
    with contextlib.redirect_stdout(None):
        return parse([*run, *arguments], world)


def measured(options: Options) -> Figures:
    """Train some steps on this rank's GPU and measure them."""
    number, begins = options.layouts.num_microbatches, []

    def note(*_) -> None:
        if len(begins) % number == 0:
            torch.cuda.synchronize()
        begins.append(time.perf_counter())

    def observe(stages: list) -> list:
        stages[0].register_forward_pre_hook(note)
        return stages

    with contextlib.redirect_stdout(None):
        session = open_session(options, make_source(options.args, options.preset))
        session.cfg.model.post_wrap_hooks.append(observe)
        train(session)
        close_session(session)
    steps = begins[::number][WARM_UP:]
    seconds = min(after - before for before, after in zip(steps, steps[1:], strict=False))
    return {"seconds": seconds, "peak_bytes": float(torch.cuda.max_memory_allocated())}


def _timed_collectives() -> list[dict]:
    """Time small and large collectives on this rank: seconds of an all-gather and a reduce-scatter,
    as a mean.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, matrix = dist.get_world_size(), torch.rand(MATRIX, MATRIX, device="cuda")

    def seconds(whole: torch.Tensor, part: torch.Tensor, communicates: bool) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(REPEATS):
            matrix @ matrix
            if communicates:
                dist.all_gather_into_tensor(whole, part)
            matrix @ matrix
            if communicates:
                dist.reduce_scatter_tensor(part, whole)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / REPEATS / 2

    taken = []
    for size in SIZES:
        part = torch.zeros(size // 4 // ranks, device="cuda")
        whole = part.repeat(ranks)
        seconds(whole, part, True)  # warms up
        more = [seconds(whole, part, True) - seconds(whole, part, False) for _ in range(ROUNDS)]
        taken.append({"ranks": ranks, "bytes": whole.nbytes, "seconds": median(more)})
    return taken


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(*sys.argv[1:])
