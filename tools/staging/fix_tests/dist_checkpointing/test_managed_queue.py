# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that writers of checkpoints make."""

import os
import signal
import subprocess
import sys
import time

import pytest

QUEUE = """
from megatron.core.dist_checkpointing.strategies import filesystem_async
filesystem_async.get_write_results_queue()
"""

WRITER = """
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda device: None
PersistentAsyncCaller._get_process(0, "fork")
"""

DEAF = """
import multiprocessing, signal, time
from megatron.core.dist_checkpointing.managed_queue import start_deaf
signal.signal(signal.SIGUSR1, print)
process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
start_deaf(process)
assert signal.getsignal(signal.SIGUSR1) is print
"""

PROGRAM = """
import multiprocessing, time
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(60)
"""


def lives(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize(("start", "killed"), [(QUEUE, True), (WRITER, True), (DEAF, False)])
def test_a_process_of_a_save_ends_with_its_rank_and_by_no_signal_that_the_rank_handles(
    start, killed
):
    command = [sys.executable, "-c", start + PROGRAM]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(rank.stdout.readline())
    assert lives(child)
    os.kill(rank.pid if killed else child, signal.SIGKILL if killed else signal.SIGUSR1)
    end = time.monotonic() + (10 if killed else 1)
    while lives(child) and time.monotonic() < end:
        time.sleep(0.2)
    alive = lives(child)
    for process in (rank.pid, child):
        if lives(process):
            os.kill(process, signal.SIGKILL)
    rank.wait()
    assert alive != killed
