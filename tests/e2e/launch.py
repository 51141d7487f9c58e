# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Start the training program as N processes and see how each of them ends."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from tests.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKOUT = REPOSITORY / "build" / ("next" if os.environ.get("NEXT") else "Megatron-LM")

LIMIT_S = 900
"""Time limit of a process."""

PRELOADED = [
    "tests.unit_tests.examples.nemotron_vlm.preloaded",
    "transformers.models.nemotron_h_omni.modeling_nemotron_h_omni",
    "megatron.energon",
]
"""Modules that processes are forked with."""


def forked(call: Callable, *arguments: object, said: Path, folder: Path = CHECKOUT) -> BaseProcess:
    """Start a call in a process that has imported the modules that take seconds.

    Args:
        call: returns the exit code. said: a file to which what the process says is appended.
        folder: in which it runs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_begin, args=(call, arguments, said, folder))
    process.start()
    return process


def _begin(call: Callable, arguments: tuple, said: Path, folder: Path) -> None:
    os.chdir(folder)
    with said.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(call(*arguments))


def end_of(process: BaseProcess) -> int | None:
    """Wait for the end of a process; return its exit code, None if it came to no end in time."""
    process.join(LIMIT_S)
    code = process.exitcode
    kill(process)
    return code


def run(ranks: int, *arguments: str | Path) -> tuple[list[int | None], str]:
    """Run the program to its end on every rank, under torchrun's agent.

    Returns:
        The ranks' exit codes, None for a rank that came to no end, and what all of them said.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder, words = Path(directory), list(map(str, arguments))
        end_of(forked(run_ranks, ranks, _rank, words, folder, said=folder / "said"))
        files = [folder / str(rank) for rank in range(ranks)]
        codes = [int(file.read_text()) if file.exists() else None for file in files]
        return codes, (folder / "said").read_text()


def _rank(arguments: list[str], folder: Path) -> None:
    """Note how the program ends, and end well: the agent would end the other ranks."""
    from examples.mimo.pretrain_nemotron_vlm import main

    try:
        code = main(arguments)
    except SystemExit as end:  # as argparse ends
        code = end.code
    (folder / os.environ["RANK"]).write_text(str(code))


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
