# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The process that writes asynchronous saves: it hashes them, and lives as long as its rank."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.launch import kill, start, wait_until
from tests.e2e.test_faults import assert_whole, newest

LIMIT_S = 90

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


@contextmanager
def training(directory: Path) -> Iterator[subprocess.Popen]:
    """A rank that has made its first steps, in a process group with all that it started."""
    metrics = directory / "metrics.jsonl"
    outputs = ("--metrics-out", metrics, "--save", directory / "saved")
    given = (directory / "hashed", *ARGUMENTS, *outputs)
    with (directory / "said").open("w") as said:
        rank = start("tests.e2e.asynchronous_saves", *given, stdout=said, stderr=said)
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
    hashed = [line.split() for line in (tmp_path / "hashed").read_text().splitlines()]
    assert sorted(name for _, name in hashed) == [".metadata", "__0_0.distcp", "metadata.json"]
    assert {name for process, name in hashed if int(process) != rank.pid} == {"__0_0.distcp"}


def test_no_process_outlives_a_rank_that_is_killed(tmp_path):
    with training(tmp_path) as rank:
        started = psutil.Process(rank.pid).children(recursive=True)
        assert len(started) > 2
        rank.kill()
        rank.wait()
        try:
            wait_until(lambda: not any(map(lives, started)), 15)
        finally:
            for process in filter(lives, started):
                process.kill()
