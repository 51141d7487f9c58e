# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A process that a save starts ends when its rank is killed, and not by a signal to save."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

RANK = """
import multiprocessing, os, pickle, time
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
async_utils.torch.cuda.device_count = lambda: 1
async_utils.torch.cuda.set_device = lambda device: None
queue = filesystem_async.get_write_results_queue()
assert not multiprocessing.active_children()  # before a writer needs the queue
{start}
(child,) = multiprocessing.active_children()
time.sleep(1)
os.kill(child.pid, {number})
time.sleep(1)
print(child.is_alive(), flush=True)
time.sleep(60)
"""
"""A rank that starts a process, and says whether this lives on after a signal."""

STARTS = [
    "queue.share(); pickle.loads(pickle.dumps(queue)).put(1); assert queue.get_nowait() == 1",
    'async_utils.PersistentAsyncCaller._get_process(0, "fork")',
]


@pytest.mark.parametrize("start", STARTS, ids=["queue", "writer"])
def test_a_process_ends_with_its_rank_alone(start):
    command = [sys.executable, "-c", RANK.format(start=start, number=signal.SIGUSR1.value)]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert rank.stdout.readline() == b"True\n"
        rank.kill()
        # The process has the other end of the pipe too, which is closed when both have ended.
        assert rank.communicate(timeout=15) == (b"", None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
