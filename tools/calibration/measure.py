# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure short runs of the training program, and collectives, on ranks of this host.

On CPU ranks, which share cores with each other and with other programs, a step's time is the
processor time of the rank's process. On a GPU it is the device's time, waiting included.

``torchrun -m calibration.measure LINES FILE`` is what `measure_runs` starts: each rank runs all
command lines of LINES, and rank 0 writes what every rank measured to FILE.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.loop.run import close_session, open_session, train
from examples.mimo.nemotron_vlm.options.arguments import Options, parse
from megatron.core import cpu_runtime
from megatron.training.global_vars import unset_global_variables

STEPS, WARM_UP = 10, 2
"""Steps of a run, and how many of the first ones track memory and are not timed."""
ROUNDS = 5
"""Runs of each line on CPUs, spread over time as hosts have slow minutes; the median counts."""
COLLECTIVES = "collectives"
"""The line that times collectives instead of a run."""
SMALL, LARGE = 2**12, {"cpu": 2**22, "cuda": 2**26}
"""Approximate bytes of the collectives that give the latency, and of those for the bandwidth."""
REPEATS, MATRIX = 50, 512
"""Collectives in a row, and rows of the matrices multiplied before each, as training has it."""
CROWD = 2
"""CPU ranks per core, which take turns at each collective, as in training."""

OF_RANKS = dict(os.environ)
"""Environment of the ranks; tools/calibrate.py, which only predicts, has no GPU in its own."""

Figures = dict[str, float]
"""Figures of one rank: ``seconds`` of its fastest step, ``peak_bytes`` of tensors."""


def measure_runs(lines: list[list[str]], ranks: int, on_gpu: bool) -> list[list[Figures]]:
    """Run the program's command lines on ``ranks`` ranks; return each rank's figures, by line.

    A line that fails on a single rank says why on stderr, and has no figures. Busy cores slow each
    other down, so on CPUs as many runs go on side by side as have cores.

    Raises:
        UserError: runs on several ranks failed.
    """
    if not lines:
        return []
    groups = 1 if on_gpu else max(1, _cores() // ranks)
    found = _started((1 if on_gpu else ROUNDS) * lines, ranks, groups, on_gpu)
    by_line = [
        [run for group in found for run in group[number :: len(lines)] if all(run)]
        for number in range(len(lines))
    ]
    return [
        [
            {name: median(figures[name] for figures in runs) for name in runs[0]}
            for runs in zip(*of_line, strict=True)
        ]
        for of_line in by_line
    ]


def measure_collectives(device: str) -> list[dict]:
    """Time collectives between two GPUs of this host, if it has them, or between CPU ranks.

    CPU ranks share cores, and their seconds are processor time.
    """
    on_gpu = device == "cuda"
    ((of_ranks,),) = _started([[COLLECTIVES, device]], 2 if on_gpu else CROWD * _cores(), 1, on_gpu)
    return of_ranks[0]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _started(lines: list[list[str]], ranks: int, groups: int, on_gpu: bool) -> list[list[list]]:
    """Run lines on several groups of ranks at the same time; return what each rank measured."""
    environment = OF_RANKS | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    environment |= {} if on_gpu else {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(ranks), "-m", "calibration.measure"]
    with tempfile.TemporaryDirectory() as directory:
        listed = Path(directory) / "lines.json"
        listed.write_text(json.dumps(lines))
        files = [Path(directory) / f"{number}.json" for number in range(groups)]
        started = [subprocess.Popen([*launch, listed, file], env=environment) for file in files]
        if any([process.wait() for process in started]):
            raise UserError(f"runs on {ranks} ranks failed; the reason is above")
        return [json.loads(file.read_text()) for file in files]


def main(lines: str, file: str) -> None:
    """Run all lines on this rank; rank 0 writes what all ranks measured."""
    found = []
    for arguments in json.loads(Path(lines).read_text()):
        if "cuda" not in arguments:
            cpu_runtime.install()
        if arguments[0] == COLLECTIVES:
            mine = _timed_collectives(arguments[1])
        else:
            mine = _measured_or_empty(arguments)
        found.append([mine] * int(os.environ["WORLD_SIZE"]))
        if len(found[-1]) > 1 and dist.is_initialized():
            dist.all_gather_object(found[-1], mine)
        gc.collect()
        torch.cuda.empty_cache()
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def _measured_or_empty(arguments: list[str]) -> Figures:
    """Measure a run; on a single rank, errors of any kind are printed and leave it out."""
    try:
        mine = measured(options_of(arguments))
    except Exception as error:
        if os.environ["WORLD_SIZE"] != "1":
            raise
        unset_global_variables()
        mine, text = {}, f"{type(error).__name__}: {error}"
    else:
        text = f"{mine['seconds']:.4f} s, {mine['peak_bytes'] / 1e9:.2f} GB"
    if os.environ["RANK"] == "0":
        print(f"{' '.join(arguments)}: {text}", file=sys.stderr, flush=True)
    return mine


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

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.redirect_stdout(None), tracking:
        if is_tracked:
            tracking.enter_context(tracker)
        session = open_session(options, make_source(options.args, options.preset.images))
        session.cfg.model.post_wrap_hooks.append(observe)
        try:
            train(session)
        finally:
            if dist.get_world_size() == 1 or not sys.exc_info()[0]:  # the others may still train
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
    """Time small and large collectives on this rank, in seconds of one."""
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), device == "cuda"
    if on_gpu and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        return []
    if on_gpu:
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    clock = time.perf_counter if on_gpu else time.process_time
    ranks, matrix, taken = dist.get_world_size(), torch.rand(MATRIX, MATRIX), []

    def seconds(collective: Callable[..., object], *tensors: torch.Tensor) -> float:
        dist.barrier()
        float(matrix[0, 0])  # waits for the device
        begin = clock()
        for _ in range(REPEATS):
            matrix @ matrix
            collective(*tensors)
        float(matrix[0, 0])
        return (clock() - begin) / REPEATS

    for size in (SMALL, LARGE[device]):
        part = torch.zeros(size // 4 // ranks)
        whole = part.repeat(ranks)
        ways = {
            "all-gather": (dist.all_gather_into_tensor, whole, part),
            "reduce-scatter": (dist.reduce_scatter_tensor, part, whole),
        }
        for name, way in ways.items():
            seconds(*way)  # warms up
            more = [seconds(*way) - seconds(lambda: None) for _ in range(ROUNDS)]
            found = {"collective": name, "ranks": ranks, "bytes": whole.nbytes}
            taken.append(found | {"seconds": median(more)})
    return taken


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(*sys.argv[1:])
