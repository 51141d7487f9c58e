# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run: the last line says what is saved, and the exit code how it ended."""

import os
import signal
from multiprocessing.process import BaseProcess

import pytest

from tests.e2e.launch import CHECKOUT, LIMIT_S, REPOSITORY, end_of, forked, kill, wait_until
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import is_of_this_process

PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
LAUNCHER = ("--standalone", "--nproc-per-node", "2", PROGRAM)
ALONE = ()
SMALL = ("--train-iters", "100000", "--global-batch-size", "2", "--micro-batch-size", "1")
SMALL += ("--eval-iters", "0", "--seq-length", "32")
SAVED = "--save-interval 2 --exit-interval 100000 --save {save}"
HANDLED = SAVED + " --load {save} --exit-signal-handler"
STANDS = "step {step} is saved in {save}; the same command"
ANEW = "with --load {save}, without --finetune and --ckpt-step, goes on from there"


@pytest.mark.parametrize(
    ("start", "sent", "options", "code", "line"),
    [
        (LAUNCHER, signal.SIGINT, "", 130, "nothing is saved: there is no --save"),
        (ALONE, signal.SIGTERM, SAVED, -signal.SIGTERM, f"{STANDS} {ANEW}"),
        (LAUNCHER, signal.SIGTERM, HANDLED, 0, f"left as asked: {STANDS} goes on from there"),
    ],
    ids=["Ctrl-C", "SIGTERM of one process", "SIGTERM that the launcher hands on"],
)
def test_the_last_line_says_what_is_saved_and_how_to_go_on(
    start, sent, options, code, line, tmp_path
):
    save, said, metrics = tmp_path / "saved", tmp_path / "said", tmp_path / "metrics.jsonl"
    words = [*start, *SMALL, "--metrics-out", str(metrics), *options.format(save=save).split()]
    started = forked(_start, words, said=said)
    tracker = save / "latest_checkpointed_iteration.txt"
    begun = tracker if options else metrics
    try:
        wait_until(lambda: (begun.exists() and begun.read_text()) or _ended(started), LIMIT_S)
        (os.kill if options == HANDLED else os.killpg)(started.pid, sent)
        ended, text = end_of(started), said.read_text()
    finally:
        kill(started)
    assert ended == code, text
    line = line.format(step=tracker.read_text() if options else "", save=save)
    reason = f"error: ended by {sent.name}: " if code else ""
    assert text.splitlines()[-1] == reason + line
    assert "Traceback" not in text and len(text.splitlines()) < 20, text


def _start(words: list[str]) -> int:
    """Be the launcher, or the program alone, with a process group of its own."""
    from examples.mimo.common.launch import launch
    from examples.mimo.pretrain_nemotron_vlm import main

    os.setsid()
    for name in filter(is_of_this_process, list(os.environ)):  # a test before may have set it
        del os.environ[name]
    os.environ["PYTHONPATH"] = f"{CHECKOUT}{os.pathsep}{REPOSITORY}"
    return launch(words) if words[0] == LAUNCHER[0] else main(words)


def _ended(process: BaseProcess) -> bool:
    assert process.is_alive(), "it ended before the signal"
    return False
