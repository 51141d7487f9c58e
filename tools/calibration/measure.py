# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure short runs of the training program, and collectives, on ranks of this host.

On CPU ranks, which share cores with each other and with other programs, a step's time is the
processor time of the rank's process. On a GPU it is the device's time, waiting included.

``torchrun -m calibration.measure FILE ARGUMENTS…`` is what is started: each rank does a run of the
program, or times collectives if the arguments are a device alone, and rank 0 writes what every rank
measured.
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
import weakref
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.loop.run import close_session, open_session, train
from examples.mimo.nemotron_vlm.options.arguments import Options, parse
from megatron.core import cpu_runtime

STEPS, WARM_UP = 10, 2
"""Steps of a run, and how many of the first ones track memory and are not timed."""
ROUNDS = 3
"""Runs of each line on CPUs, spread over time as hosts have slow minutes; the median counts."""
SIZES = {"cpu": (2**12, 2**22), "cuda": (2**12, 2**26)}
"""Approximate bytes of the collectives, of which few give the latency and many the bandwidth."""
REPEATS, MATRIX = 50, 512
"""Collectives in a row, and rows of the matrices multiplied before each, as training has it."""
CORES = len(os.sched_getaffinity(0))

OF_RANKS = dict(os.environ)
"""Environment of the ranks; tools/calibrate.py, which only predicts, has no GPU in its own."""

Figures = dict[str, float]
"""Figures of one rank: ``seconds`` of its fastest step, ``peak_bytes`` of tensors."""


def measure_runs(lines: list[list[str]], ranks: int, on_gpu: bool) -> list[list[Figures]]:
    """Run the program's command lines on ``ranks`` ranks; return each rank's figures, by line.

    A line that fails says why on stderr, and has no figures. Busy cores slow each other down, so on
    CPUs as many runs go on side by side as have cores.
    """
    groups, rounds = (1, 1) if on_gpu else (max(1, CORES // ranks), ROUNDS)
    found: list[list[list[Figures]]] = [[] for _ in lines]
    for _ in range(rounds):
        for of_line, line in zip(found, lines, strict=True):
            of_line += _started(line, ranks, groups, on_gpu)
    return [
        [
            {name: median(figures[name] for figures in runs) for name in runs[0]}
            for runs in zip(*of_line, strict=True)
        ]
        for of_line in found
    ]


def measure_collectives(device: str) -> list[dict]:
    """Time collectives between two GPUs of this host, if it has them, or between CPU ranks.

    Two CPU ranks share each core, and their seconds are processor time.
    """
    on_gpu = device == "cuda"
    found = _started([device], 2 if on_gpu else 2 * CORES, 1, on_gpu)
    return found[0][0] if found else []


def _started(line: list[str], ranks: int, groups: int, on_gpu: bool) -> list[list]:
    """Start ``groups`` groups of ranks at the same time; return what each rank measured."""
    environment = OF_RANKS | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    environment |= {} if on_gpu else {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(ranks), "-m", "calibration.measure"]
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{number}.json" for number in range(groups)]
        started = [subprocess.Popen([*launch, file, *line], env=environment) for file in files]
        for process in started:
            process.wait()
        found = [json.loads(file.read_text()) for file in files if file.exists()]
    for figures in (ranks[0] for ranks in found if len(line) > 1):
        text = f"{figures['seconds']:.4f} s, {figures['peak_bytes'] / 1e9:.2f} GB"
        print(f"{' '.join(line)}: {text}", file=sys.stderr, flush=True)
    return found


def main(file: str, *arguments: str) -> None:
    """Measure on this rank; rank 0 writes what all ranks measured."""
    if "cuda" not in arguments:
        cpu_runtime.install()
    is_run = len(arguments) > 1
    mine = measured(options_of(list(arguments))) if is_run else _timed_collectives(*arguments)
    found = [mine] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()


def options_of(arguments: list[str], world: int | None = None) -> Options:
    """Parse the program's options for a short run, on mock data unless arguments differ."""
    run = ["--data", "mock", "--train-iters", str(STEPS), "--log-interval", "1000"]
    with contextlib.redirect_stdout(None):
        return parse([*run, *arguments], world)


def measured(options: Options) -> Figures:
    """Train some steps on this rank and measure them; collective over the world.

    On CPU ranks with context parallelism, memory is not tracked: attention's masks are of a tensor
    subclass that PyTorch cannot create from tracked tensors.
    """
    on_gpu, number = options.args.device == "cuda", options.layouts.num_microbatches
    is_tracked = not on_gpu and options.layouts.language.cp == 1
    tracker, tracking = LiveTensors(), contextlib.ExitStack()  # active until the timed steps
    clock = time.perf_counter if on_gpu else time.process_time
    begins: list[float] = []

    def note(*_) -> None:
        if on_gpu and len(begins) % number == 0:
            torch.cuda.synchronize()
        elif is_tracked and len(begins) == WARM_UP * number:
            tracking.close()
        begins.append(clock())

    def observe(stages: list) -> list:
        stages[0].register_forward_pre_hook(note)
        return stages

    with contextlib.redirect_stdout(None), tracking:
        if is_tracked:
            tracking.enter_context(tracker)
        session = open_session(options, make_source(options.args, options.preset))
        session.cfg.model.post_wrap_hooks.append(observe)
        train(session)
        close_session(session)
    steps = begins[::number][WARM_UP:]
    seconds = min(after - before for before, after in zip(steps, steps[1:], strict=False))
    peak = torch.cuda.max_memory_allocated() if on_gpu else tracker.peak
    return {"seconds": seconds, "peak_bytes": float(peak)}


class LiveTensors(TorchDispatchMode):
    """Tracks the peak of bytes of the tensors that are created inside it and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor):
                self._note(value.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def free(_) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, free)
        self.now += size
        self.peak = max(self.peak, self.now)


def _timed_collectives(device: str) -> list[dict]:
    """Time small and large collectives on this rank: seconds of an all-gather and a reduce-scatter,
    as a mean.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device == "cuda" else 0)
    dist.init_process_group("nccl")
    clock = time.perf_counter if device == "cuda" else time.process_time
    ranks, matrix = dist.get_world_size(), torch.rand(MATRIX, MATRIX, device="cuda")

    def seconds(whole: torch.Tensor, part: torch.Tensor, communicates: bool) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        begin = clock()
        for _ in range(REPEATS):
            matrix @ matrix
            if communicates:
                dist.all_gather_into_tensor(whole, part)
            matrix @ matrix
            if communicates:
                dist.reduce_scatter_tensor(part, whole)
        torch.cuda.synchronize()
        return (clock() - begin) / REPEATS / 2

    taken = []
    for size in SIZES[device]:
        part = torch.zeros(size // 4 // ranks, device="cuda")
        whole = part.repeat(ranks)
        seconds(whole, part, True)  # warms up
        more = [seconds(whole, part, True) - seconds(whole, part, False) for _ in range(ROUNDS)]
        taken.append({"ranks": ranks, "bytes": whole.nbytes, "seconds": median(more)})
    return taken


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(*sys.argv[1:])
