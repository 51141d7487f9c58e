# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Start the training program as N processes and see how each of them ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[2] / "build" / "Megatron-LM"
SCRIPT = "examples/mimo/pretrain_nemotron_vlm.py"


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    output: str
    errors: str

    @property
    def error_lines(self) -> list[str]:
        """What it said was wrong."""
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(ranks: int, *arguments: str, program: tuple[str, ...] = (SCRIPT,)) -> list:
    """Start the ranks and return at once.

    Args:
        program: what Python runs, in place of the training program.
    """
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return [
        subprocess.Popen(
            [sys.executable, *map(str, (*program, *arguments))],
            cwd=CHECKOUT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]


def under_torchrun(
    ranks: int,
    *arguments: str,
    launcher: tuple[str, ...] = (),
    program: tuple[str, ...] = (SCRIPT,),
) -> subprocess.Popen:
    """Start the program under torchrun and return at once; only what it says of errors is kept.

    Args:
        launcher: torchrun's arguments.
        program: what Python runs, in place of the training program.
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return subprocess.Popen(
        [sys.executable, *torchrun, *launcher, *map(str, (*program, *arguments))],
        cwd=CHECKOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen) -> None:
    """SIGKILL a rank or a launcher with all that it started, which hold its pipes open."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    for each in (process, *started):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def run(
    ranks: int, *arguments: str, timeout_s: float = 150, program: tuple[str, ...] = (SCRIPT,)
) -> list[Ended]:
    """Run the program to its end on every rank."""
    processes = start(ranks, *arguments, program=program)
    try:
        ends = []
        for process in processes:
            output, errors = process.communicate(timeout=timeout_s)
            ends.append(Ended(process.returncode, output, errors))
        return ends
    finally:
        for process in processes:
            kill(process)
