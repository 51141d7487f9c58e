# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run: the last line says what is saved, and the exit code how it ended."""

import os
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.e2e.launch import CHECKOUT, LIMIT_S, REPOSITORY, kill, wait_until
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import is_of_this_process

PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
LAUNCHER = ("-m", "examples.mimo.common.launch", "--standalone", "--nproc-per-node", "2", PROGRAM)
ALONE = (PROGRAM,)
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
    words = [*case.start, *SMALL, "--metrics-out", metrics, *options]
    # A test before may have named this process a rank.
    environment = {n: os.environ[n] for n in os.environ if not is_of_this_process(n)}
    environment["PYTHONPATH"] = f"{CHECKOUT}{os.pathsep}{REPOSITORY}"
    with said.open("w") as file:
        started = subprocess.Popen(
            [sys.executable, *map(str, words)],
            **{"cwd": CHECKOUT, "env": environment, "stdout": file, "stderr": file},
            start_new_session=True,
        )
    tracker = save / "latest_checkpointed_iteration.txt"
    begun = tracker if options else metrics
    try:
        wait_until(lambda: (begun.exists() and begun.read_text()) or _ended(started), LIMIT_S)
        send = os.kill if case.to == "launcher" else os.killpg
        send(started.pid, case.sent)
        code = started.wait(LIMIT_S)
    finally:
        kill(started)
    text = said.read_text()
    assert code in (case.code, -case.sent if case.start is ALONE else case.code), text
    step = tracker.read_text() if options else ""
    stands = f"step {step} is saved in {save}; {case.how.format(save=save)} goes on from there"
    stands = stands if options else "nothing is saved: there is no --save"
    assert text.splitlines()[-1] == case.line.format(
        *([case.sent.name] if case.line is ENDED else []), stands
    )
    assert "Traceback" not in text and len(text.splitlines()) < 20, text


def _ended(process: subprocess.Popen) -> bool:
    assert process.poll() is None, "it ended before the signal"
    return False
