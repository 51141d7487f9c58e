# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Start the training program as N processes and see how each of them ends."""

import contextlib
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from tests.agent import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKOUT = REPOSITORY / "build" / ("next" if os.environ.get("NEXT") else "Megatron-LM")

LIMIT_S = 900
"""Time limit of all ranks."""

PRELOADED = [
    "tests.unit_tests.examples.nemotron_vlm.preloaded",
    "transformers.models.nemotron_h_omni.modeling_nemotron_h_omni",
    "megatron.energon",
]
"""Modules that processes are forked with."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended; without a code if it did not come to its end."""

    code: int | None
    output: str
    errors: str

    @classmethod
    def read(cls, folder: Path) -> "Ended":
        """Read what a rank has written."""
        code, output, errors = (folder / name for name in ("code", "output", "errors"))
        ended = int(code.read_text()) if code.exists() else None
        return cls(ended, output.read_text(), errors.read_text())

    @property
    def error_lines(self) -> list[str]:
        """Return its lines of output that report an error."""
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]


def forked(call: Callable, *arguments: object) -> BaseProcess:
    """Start a call in a process that has imported the modules that take seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=call, args=arguments)
    process.start()
    return process


def run(ranks: int, *arguments: str | Path) -> list[Ended]:
    """Run the program to its end on every rank, under torchrun's agent."""
    with tempfile.TemporaryDirectory() as directory:
        agent = forked(run_ranks, ranks, _rank, list(map(str, arguments)), directory)
        agent.join(LIMIT_S)
        kill(agent)
        return [Ended.read(Path(directory, str(rank))) for rank in range(ranks)]


def _rank(arguments: list[str], directory: str) -> None:
    """Note how the program ends, and end well: the agent would end the other ranks."""
    from examples.mimo.pretrain_nemotron_vlm import main

    own = Path(directory, os.environ["RANK"])
    own.mkdir()
    redirect(own / "output", own / "errors")
    os.chdir(CHECKOUT)
    try:
        code = main(arguments)
    except SystemExit as end:  # as argparse ends
        code = end.code
    (own / "code").write_text(str(code))


def redirect(output: Path, errors: Path | None = None) -> None:
    """Write what this process says into a file, or its errors into another."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if errors:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)


def wait_until(holds: Callable[[], bool], limit_s: float) -> None:
    """Wait until the condition holds.

    Raises:
        AssertionError: it does not within ``limit_s`` seconds.
    """
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not so after {limit_s} s"
        time.sleep(0.1)


def kill(process: subprocess.Popen | BaseProcess) -> None:
    """SIGKILL a rank or a launcher, and all that it started: these hold its pipes open."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    for each in (process, *started):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait() if isinstance(process, subprocess.Popen) else process.join()
