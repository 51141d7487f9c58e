# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a short run of the training program takes on this rank: seconds of a step, and peak memory.

On CPU ranks, which share cores with each other and with whatever else runs, a step's time is the
processor time of the rank's process; the step's wall time is kept beside it. On a GPU it is the
time of the device, waiting included.

    torchrun --nproc-per-node N -m calibration.measure CASES FILE

runs the cases of CASES one after the other, a JSON list of the program's command lines, and writes
to FILE what each rank found of each.
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

from examples.mimo.nemotron_vlm.arguments import Options, parse
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.run import close_session, open_session, train
from examples.mimo.pretrain_nemotron_vlm import ALONE

AGAIN = 100
"""How often other cores repeat their runs, at most: more often than is measured; they are ended."""
ROUNDS = 5
"""Runs of each case on CPUs, some time apart, whose median counts: hosts have slow minutes."""
STEPS, WARM_UP = 10, 2
"""Steps of a run, and the first of them, in which memory is followed and time does not count."""


@dataclass(frozen=True)
class Measured:
    """Of one rank: seconds of work and of wall time of the fastest step, and bytes of tensors."""

    seconds: float
    wall: float
    peak_bytes: float


class LiveTensors(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those that are made within."""

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
    """Train some steps on this rank; collective over the world.

    On CPU ranks with context parallelism memory is not followed: attention's masks are tensors of a
    class of their own, which PyTorch does not make of one that is followed.
    """
    on_gpu = options.args.device == "cuda"
    follows = not on_gpu and options.layouts.language.cp == 1
    tracker, following = LiveTensors(), contextlib.ExitStack()  # until the steps that are timed
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
    """The program's options of a short run, on random samples where no others are asked."""
    run = ["--data", "mock", "--train-iters", str(STEPS), "--log-interval", "1000"]
    with _silence():
        return parse([*run, *arguments], world)


@contextlib.contextmanager
def busy_cores(lines: list[list[str]], ranks: int = 1) -> Iterator[None]:
    """While it lasts, the cores that so many ranks leave do runs of one rank: cores that are busy
    slow each other.

    Args:
        lines: command lines of these runs.
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
    """Without what Megatron prints."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        yield


def main(cases: str, file: str) -> None:
    """Measure on this rank, and let the first write what all found, after each case."""
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
