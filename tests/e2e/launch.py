# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Start the training program as N processes and see how each of them ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[2] / "build" / "Megatron-LM"

LIMIT_S = 150
"""Time limit of one rank."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    output: str
    errors: str

    @property
    def error_lines(self) -> list[str]:
        """Return its lines of output that report an error."""
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run(ranks: int, *arguments: str | Path) -> list[Ended]:
    """Run the program to its end on every rank.

    The ranks are forked from a process that has imported the modules that take seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["examples.mimo.nemotron_vlm.loop.run", "sklearn.datasets"])
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(_free_port()),
    }
    with tempfile.TemporaryDirectory() as directory:
        said = [Path(directory, str(rank)) for rank in range(ranks)]
        processes = []
        try:
            for rank, own in enumerate(said):
                own.mkdir()
                environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                given = (list(map(str, arguments)), environment, own)
                processes.append(context.Process(target=_rank, args=given))
                processes[-1].start()
            for process in processes:
                process.join(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
        return [
            Ended(process.exitcode, (own / "output").read_text(), (own / "errors").read_text())
            for process, own in zip(processes, said, strict=True)
        ]


def _rank(arguments: list[str], environment: dict[str, str], said: Path) -> None:
    from examples.mimo.pretrain_nemotron_vlm import main

    for stream, name in ((sys.stdout, "output"), (sys.stderr, "errors")):
        with (said / name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(environment)
    os.chdir(CHECKOUT)
    sys.exit(main(arguments))


def kill(process: subprocess.Popen) -> None:
    """SIGKILL a rank or a launcher, and all that it started: these hold its pipes open."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    for each in (process, *started):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
