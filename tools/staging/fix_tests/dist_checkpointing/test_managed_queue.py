# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that writers of checkpoints make."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.core.dist_checkpointing.managed_queue import discard

QUEUE = "filesystem_async.get_write_results_queue()"

WRITER = """
torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda device: None
async_utils.PersistentAsyncCaller._get_process(0, "fork")
"""

DEAF = """
from megatron.core.dist_checkpointing.managed_queue import start_deaf
signal.signal(signal.SIGUSR1, print)
process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
start_deaf(process)
assert signal.getsignal(signal.SIGUSR1) is print
"""

STARTS = {QUEUE: signal.SIGKILL, WRITER: signal.SIGKILL, DEAF: signal.SIGUSR1}
"""Code that starts a process of a rank. SIGKILL goes to the rank, other signals to the process."""

RANKS = """
import multiprocessing, os, signal, sys, time, torch
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
for number, start in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        child = 0
        try:
            exec(start)
            child = multiprocessing.active_children()[0].pid
        finally:
            os.write(1, f"{number} {os.getpid()} {child}\\n".encode())
            time.sleep(60)
            os._exit(1)
time.sleep(60)
"""
"""Forks ranks, as importing Megatron takes seconds; each says the ids of itself and its process."""


def lives(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def living() -> dict[str, tuple[bool, bool]]:
    """Whether each process was alive before and after the signal."""
    command = [sys.executable, "-c", RANKS, *STARTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        lines = sorted(parent.stdout.readline() for _ in STARTS)
        ids = [tuple(map(int, line.split()[1:])) for line in lines]
        before = [lives(child) for _, child in ids]
        for (rank, child), number in zip(ids, STARTS.values(), strict=True):
            if child:
                os.kill(rank if number == signal.SIGKILL else child, number)
        end = time.monotonic() + 10
        while any(lives(child) for _, child in ids[:-1]) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1)  # for the signal that the last shall not hear
        after = [lives(child) for _, child in ids]
        for process in (parent.pid, *(each for pair in ids for each in pair)):
            if lives(process):
                os.kill(process, signal.SIGKILL)
    return dict(zip(STARTS, zip(before, after, strict=True), strict=True))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("start", STARTS, ids=["queue", "writer", "deaf"])
def test_a_process_of_a_save_ends_with_its_rank_and_by_no_signal_that_the_rank_handles(
    living, start
):
    assert living[start] == (True, start == DEAF)


def test_a_queue_that_has_sent_all_is_discarded(monkeypatch):
    queue = multiprocessing.get_context("fork").JoinableQueue()
    queue.put(1)
    assert queue.get() == 1
    close = queue.close

    def close_slowly() -> None:
        close()
        queue._thread.join()  # which closes the queue's end of the pipe

    monkeypatch.setattr(queue, "close", close_slowly)
    discard(queue)
    assert not queue._thread.is_alive()
