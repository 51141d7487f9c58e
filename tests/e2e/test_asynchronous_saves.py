# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The process that writes asynchronous saves lives as long as its rank, which notices its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
from tests.e2e.launch import kill, wait_until
from tests.e2e.test_faults import assert_whole, newest, saves_that_failed

LIMIT_S = 900

ARGUMENTS = (
    *("--device", "cpu", "--async-save", "--train-iters", "100000", "--save-interval", "100000"),
    *("--global-batch-size", "4", "--micro-batch-size", "4", "--async-ckpt-io-priority", "2"),
    *("--exit-signal-handler", "--exit-signal", "SIGUSR1"),
)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def writers(rank: subprocess.Popen | psutil.Process) -> list[psutil.Process]:
    """The process that writes, once it has its priority."""
    started = psutil.Process(rank.pid).children(recursive=True)
    return [process for process in started if process.nice() == 10]


@contextmanager
def training(directory: Path, *more: str) -> Iterator[subprocess.Popen]:
    """A rank that has made its first steps, in a process group with all that it started."""
    metrics = directory / "metrics.jsonl"
    outputs = ("--metrics-out", metrics, "--save", directory / "saved")
    given = (*ARGUMENTS, *outputs, *more)
    with (directory / "said").open("w") as said:
        command = [sys.executable, "-m", "tests.e2e.asynchronous_saves", *map(str, given)]
        options = {"start_new_session": True, "stdout": said, "stderr": said}
        rank = subprocess.Popen(command, **options)
    try:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, LIMIT_S)
        yield rank
    finally:
        kill(rank)


def test_a_signal_to_all_processes_ends_the_rank_with_a_checkpoint(tmp_path):
    with training(tmp_path) as rank:
        os.killpg(rank.pid, signal.SIGUSR1)
        assert rank.wait(LIMIT_S) == 0, (tmp_path / "said").read_text()
    saved = newest(tmp_path / "saved")
    assert saved
    assert_whole(tmp_path / "saved" / f"iter_{saved:07d}", ranks=1)


def test_no_process_outlives_a_rank_that_is_killed(tmp_path):
    with training(tmp_path) as rank:
        started = psutil.Process(rank.pid).children(recursive=True)
        assert len(started) > 2
        rank.kill()
        rank.wait()
        try:
            wait_until(lambda: not any(map(lives, started)), LIMIT_S)  # one may still import
        finally:
            for process in filter(lives, started):
                process.kill()


def test_after_the_writers_death_a_save_fails_and_later_ones_are_synchronous(tmp_path):
    saved, said = tmp_path / "saved", tmp_path / "said"

    def failed() -> list[int]:
        return [int(step) for _, step in saves_that_failed(said.read_text())]

    with training(tmp_path, "--save-interval", "20") as rank:
        wait_until(lambda: writers(rank), LIMIT_S)
        min(writers(rank), key=psutil.Process.create_time).kill()  # it may have started a process
        goes_on = lambda: failed() and (newest(saved) or 0) > failed()[-1]  # noqa: E731
        wait_until(lambda: goes_on() or rank.poll() is not None, LIMIT_S)
        rank.send_signal(signal.SIGUSR1)
        assert rank.wait(LIMIT_S) == 0, said.read_text()
    assert "was not saved: rank 0: its writing process has ended; " in said.read_text()
    first, *later = failed()
    assert later in ([], [first + 20])  # the one after it may have been under way
    (log,) = tmp_path.glob("log-*.txt")
    assert log.read_text().count("scheduled an async checkpoint save") == first / 20 + len(later)
    steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, newest(saved) + 1))
    made = {int(directory.name[5:]) for directory in saved.glob("iter_*")}
    assert set(range(20, newest(saved) + 1, 20)) - made == {first, *later}
    assert_whole(saved / f"iter_{first + 20 * (1 + len(later)):07d}", ranks=1)
