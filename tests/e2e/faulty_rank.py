# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The training program with a fault on one rank, when it first does what the fault names.

faulty_rank.py FAULT [program arguments]      FAULT is JSON: rank, at, kind; module
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import sys
import time

SCRIPT = "examples/mimo/pretrain_nemotron_vlm.py"
TRAINERS = []


def bad_gradients(module: str) -> None:
    """Every gradient of one module of this rank becomes NaN."""
    (trainer,) = TRAINERS
    stage = trainer.stages[0]
    ddp = stage.language_model if module == "language" else stage.modality_submodules[module]
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        buffer.grad_data.fill_(float("nan"))


def strike(kind: str, module: str | None) -> None:
    """Do what the fault is."""
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "raise":
        raise ValueError("the fault that was asked for")
    elif kind == "hang":
        while True:
            time.sleep(1)
    elif kind == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    elif kind == "nan":
        bad_gradients(module)


def main() -> None:
    fault = json.loads(sys.argv[1])
    sys.argv = [SCRIPT, *sys.argv[2:]]
    sys.path.insert(0, os.getcwd())
    from examples.mimo.nemotron_vlm import progress

    note, times = progress.note, fault.get("times", 1)

    def faulty_note(what: str, patience: int = 1) -> None:
        nonlocal times
        note(what, patience)
        hit = int(os.environ["RANK"]) == fault["rank"] and fault["at"] in what
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if hit and times and not restarted:
            times -= 1
            strike(fault["kind"], fault.get("module"))

    progress.note = faulty_note
    if fault["kind"] == "nan":
        _remember_trainers()
    runpy.run_path(SCRIPT, run_name="__main__")


def _remember_trainers() -> None:
    from megatron.core import cpu_runtime

    cpu_runtime.install()
    from examples.mimo.nemotron_vlm import trainer

    build = trainer.Trainer.__init__

    def remembered(self, *arguments, **options):
        build(self, *arguments, **options)
        TRAINERS.append(self)

    trainer.Trainer.__init__ = remembered


if __name__ == "__main__":
    main()
