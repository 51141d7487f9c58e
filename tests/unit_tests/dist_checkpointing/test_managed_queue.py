# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that a save starts end when their rank is killed, and not by a signal to save."""

import contextlib
import os
import signal
import subprocess
import sys

RANK = """
import multiprocessing, os, pickle, signal, time
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
async_utils.torch.cuda.device_count = lambda: 1
async_utils.torch.cuda.set_device = lambda device: None
queue = filesystem_async.get_write_results_queue()
assert not multiprocessing.active_children()  # before a writer needs the queue
queue.share()
pickle.loads(pickle.dumps(queue)).put(1)
assert queue.get_nowait() == 1
async_utils.PersistentAsyncCaller._get_process(0, "fork")
children = multiprocessing.active_children()
time.sleep(1)
for child in children:
    os.kill(child.pid, signal.SIGUSR1)
time.sleep(1)
print([child.is_alive() for child in children], flush=True)
time.sleep(60)
"""
"""A rank that starts the process of a queue and one that writes, and says whether both live on."""


def test_processes_end_with_their_rank_alone():
    command = [sys.executable, "-c", RANK]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert rank.stdout.readline() == b"[True, True]\n"
        rank.kill()
        # Both have the other end of the pipe too, which is closed when all have ended.
        assert rank.communicate(timeout=15) == (b"", None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
