# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run: the last line says what is saved, and the exit code how it ended."""

import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.launch import CHECKOUT, LIMIT_S, REPOSITORY, forked, kill, wait_until
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import is_of_this_process

PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
LAUNCHER = ("--standalone", "--nproc-per-node", "2", PROGRAM)
ALONE = ()
SMALL = ("--train-iters", "100000", "--global-batch-size", "2", "--micro-batch-size", "1")
SMALL += ("--eval-iters", "0", "--seq-length", "32")
ENDED, LEFT = "error: ended by {}: {}", "left as asked: {}"


class Case(NamedTuple):
    """A signal, the process or group that gets it, options, and how the run ends."""

    start: tuple[str, ...]
    sent: signal.Signals
    to: str
    options: str
    code: int
    line: str
    how: str = "the same command"


SAVED = "--save-interval 2 --exit-interval 100000 --save {save}"
HANDLED = SAVED + " --load {save} --exit-signal-handler"
WITH = "the same command with --load {save}, without --finetune and --ckpt-step,"
CASES = {
    "Ctrl-C": Case(LAUNCHER, signal.SIGINT, "group", "", 130, ENDED),
    "SIGTERM of one process": Case(ALONE, signal.SIGTERM, "group", SAVED, 143, ENDED, WITH),
    "SIGTERM that is handled": Case(LAUNCHER, signal.SIGTERM, "launcher", HANDLED, 0, LEFT),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_last_line_says_what_is_saved_and_how_to_go_on(case, tmp_path):
    save, said, metrics = tmp_path / "saved", tmp_path / "said", tmp_path / "metrics.jsonl"
    options = [word.format(save=save) for word in case.options.split()]
    words = [*case.start, *SMALL, "--metrics-out", str(metrics), *options]
    started = forked(_start, words, said)
    tracker = save / "latest_checkpointed_iteration.txt"
    begun = tracker if options else metrics
    try:
        wait_until(lambda: (begun.exists() and begun.read_text()) or _ended(started), LIMIT_S)
        send = os.kill if case.to == "launcher" else os.killpg
        send(started.pid, case.sent)
        started.join(LIMIT_S)
    finally:
        kill(started)
    text = said.read_text()
    assert started.exitcode == (case.code if case.start else -case.sent), text
    step = tracker.read_text() if options else ""
    stands = f"step {step} is saved in {save}; {case.how.format(save=save)} goes on from there"
    stands = stands if options else "nothing is saved: there is no --save"
    assert text.splitlines()[-1] == case.line.format(
        *([case.sent.name] if case.line is ENDED else []), stands
    )
    assert "Traceback" not in text and len(text.splitlines()) < 20, text


def _start(words: list[str], said: Path) -> None:
    """Be the launcher, or the program alone, with a process group of its own."""
    from examples.mimo.common.launch import launch
    from examples.mimo.pretrain_nemotron_vlm import main

    os.setsid()
    os.chdir(CHECKOUT)
    for name in filter(is_of_this_process, list(os.environ)):  # a test before may have set it
        del os.environ[name]
    os.environ["PYTHONPATH"] = f"{CHECKOUT}{os.pathsep}{REPOSITORY}"
    with said.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.exit(launch(words) if words[0] == LAUNCHER[0] else main(words))


def _ended(process: BaseProcess) -> bool:
    assert process.is_alive(), "it ended before the signal"
    return False
