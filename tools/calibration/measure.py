# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measurement of short runs of the training program on this rank: seconds of a step, peak memory.

On CPU ranks, which share cores with each other and with other programs, a step's time is the
processor time of the rank's process; its wall time is kept as well. On a GPU it is the device's
time, waiting included.

    torchrun --nproc-per-node N -m calibration.measure CASES FILE

runs the cases of CASES, a JSON list of the program's command lines, one after another, and writes
each rank's measurements of each case to FILE.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.loop.run import close_session, open_session, train
from examples.mimo.nemotron_vlm.options.arguments import Options, parse
from examples.mimo.pretrain_nemotron_vlm import ALONE

AGAIN = 100
"""Upper limit of repetitions of the runs on other cores, which are killed before they reach it."""
ROUNDS = 5
"""Runs of each case on CPUs, spread over time as hosts have slow minutes; the median counts."""
STEPS, WARM_UP = 10, 2
"""Steps of a run, and how many of the first ones track memory and are not timed."""


@dataclass(frozen=True)
class Measured:
    """Figures of one rank: work and wall seconds of its fastest step, peak bytes of tensors."""

    seconds: float
    wall: float
    peak_bytes: float


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
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def free(_) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, free)
        self.now += size
        self.peak = max(self.peak, self.now)


def measured(options: Options) -> Measured:
    """Train some steps on this rank and measure them; collective over the world.

    On CPU ranks with context parallelism, memory is not tracked: attention's masks are of a tensor
    subclass that PyTorch cannot create from tracked tensors.
    """
    on_gpu = options.args.device == "cuda"
    follows = not on_gpu and options.layouts.language.cp == 1
    tracker, following = LiveTensors(), contextlib.ExitStack()  # active until the timed steps
    begins: list[tuple[float, float]] = []

    def note(*_) -> None:
        if on_gpu and len(begins) % options.layouts.num_microbatches == 0:
            torch.cuda.synchronize()
        elif follows and len(begins) == WARM_UP * options.layouts.num_microbatches:
            following.close()
        begins.append((time.perf_counter() if on_gpu else time.process_time(), time.perf_counter()))

    def observe(stages: list) -> list:
        stages[0].register_forward_pre_hook(note)
        return stages

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with _silence(), following:
        if follows:
            following.enter_context(tracker)
        session = open_session(options, make_source(options.args, options.preset.encoder))
        session.cfg.model.post_wrap_hooks.append(observe)
        try:
            train(session)
        finally:
            if dist.get_world_size() == 1 or not sys.exc_info()[0]:  # the others may still train
                close_session(session)
    steps = begins[:: options.layouts.num_microbatches][WARM_UP:]
    work, wall = (
        [after[clock] - before[clock] for before, after in zip(steps, steps[1:], strict=False)]
        for clock in (0, 1)
    )
    peak = torch.cuda.max_memory_allocated() if on_gpu else tracker.peak
    return Measured(min(work), min(wall), float(peak))


def options_of(arguments: list[str], world: int | None = None) -> Options:
    """Parse the program's options for a short run, on mock data unless arguments differ."""
    run = ["--data", "mock", "--train-iters", str(STEPS), "--log-interval", "1000"]
    with _silence():
        return parse([*run, *arguments], world)


@contextlib.contextmanager
def busy_cores(lines: list[list[str]], ranks: int = 1) -> Iterator[None]:
    """Keep the cores that ``ranks`` ranks leave free busy with runs of one rank inside the block.

        Busy cores slow each other down, so measurements are made under load.

    Args:
        lines: command lines of the runs.
        ranks: number of ranks that are measured.
    """
    with tempfile.TemporaryDirectory() as directory:
        cases = Path(directory) / "cases.json"
        cases.write_text(json.dumps(AGAIN * lines))
        alone = ALONE | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "calibration.measure", cases, os.devnull]
        others = [
            subprocess.Popen(command, env=os.environ | alone, stderr=subprocess.DEVNULL)
            for _ in range(len(os.sched_getaffinity(0)) - ranks)
        ]
        try:
            yield
        finally:
            for other in others:
                other.kill()
                other.wait()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what Megatron prints inside the block."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        yield


def main(cases: str, file: str) -> None:
    """Measure all cases on this rank; after each, rank 0 writes what all ranks measured."""
    from megatron.core import cpu_runtime

    found = []
    for arguments in json.loads(Path(cases).read_text()):
        if "cuda" not in arguments:
            cpu_runtime.install()
        mine = asdict(measured(options_of(arguments)))
        everywhere: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        found.append(everywhere)
        gc.collect()
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            Path(file).write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
