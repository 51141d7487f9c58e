# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A rank notices the end of the process that writes its asynchronous saves.

That the process ends with its rank alone is in test_managed_queue.py.
"""

import signal
import subprocess
import sys

import psutil

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
from tests.e2e.launch import LIMIT_S, kill, wait_until
from tests.e2e.test_faults import assert_whole, newest, saves_that_failed

INTERVAL, NICENESS = 20, 10
"""Steps between saves, and the niceness of a writer with ``--async-ckpt-io-priority 2``."""

ARGUMENTS = (
    *("--device", "cpu", "--async-save", "--train-iters", "100000"),
    *("--global-batch-size", "4", "--micro-batch-size", "4", "--async-ckpt-io-priority", "2"),
    *("--exit-signal-handler", "--exit-signal", "SIGUSR1", "--save-interval", str(INTERVAL)),
)


def test_after_the_writers_death_a_save_fails_and_later_ones_are_synchronous(tmp_path):
    saved, said, metrics = (tmp_path / name for name in ("saved", "said", "metrics.jsonl"))
    words = [*ARGUMENTS, "--metrics-out", str(metrics), "--save", str(saved)]

    def failed() -> list[int]:
        return [int(step) for _, step in saves_that_failed(said.read_text())]

    def writers() -> list[psutil.Process]:
        started = psutil.Process(rank.pid).children(recursive=True)
        return [process for process in started if process.nice() == NICENESS]

    with said.open("w") as file:
        command = [sys.executable, "-m", "tests.e2e.asynchronous_saves", *words]
        rank = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_until(lambda: rank.poll() is not None or writers(), LIMIT_S)
        min(writers(), key=psutil.Process.create_time).kill()  # it may have started a process
        goes_on = lambda: failed() and newest(saved) > failed()[-1]  # noqa: E731
        wait_until(lambda: goes_on() or rank.poll() is not None, LIMIT_S)
        rank.send_signal(signal.SIGUSR1)
        assert rank.wait(LIMIT_S) == 0, said.read_text()
    finally:
        kill(rank)
    assert "was not saved: rank 0: its writing process has ended; " in said.read_text()
    first, *later = failed()
    assert later in ([], [first + INTERVAL])  # the one after it may have been under way
    (log,) = tmp_path.glob("log-*.txt")
    scheduled = log.read_text().count("scheduled an async checkpoint save")
    assert scheduled == first / INTERVAL + len(later)
    last = newest(saved)
    assert [record["step"] for record in read_metrics(metrics)] == list(range(1, last + 1))
    made = {int(directory.name[5:]) for directory in saved.glob("iter_*")}
    assert set(range(INTERVAL, last + 1, INTERVAL)) - made == {first, *later}
    assert_whole(saved / f"iter_{first + INTERVAL * (1 + len(later)):07d}", ranks=1)
