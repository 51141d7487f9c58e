# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A process that a save starts ends when its rank is killed."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

RANK = """
import multiprocessing, os, signal, time
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
signal.signal(signal.SIGUSR1, print)
async_utils.torch.cuda.device_count = lambda: 1
async_utils.torch.cuda.set_device = lambda device: None
{start}
(child,) = multiprocessing.active_children()
os.kill(child.pid, {number})
time.sleep(1)
print(child.is_alive(), flush=True)
time.sleep(60)
"""
"""A rank that starts a process, and says whether this lives on after a signal."""

QUEUE = "filesystem_async.get_write_results_queue()"
WRITER = 'async_utils.PersistentAsyncCaller._get_process(0, "fork")'


@pytest.mark.parametrize(("start", "number"), [(QUEUE, 0), (WRITER, signal.SIGUSR1.value)])
def test_a_process_ends_with_its_rank_and_not_by_a_signal_that_the_rank_handles(start, number):
    command = [sys.executable, "-c", RANK.format(start=start, number=number)]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert rank.stdout.readline() == b"True\n"
        rank.kill()
        # The process has the other end of the pipe too, which is closed when both have ended.
        assert rank.communicate(timeout=15) == (b"", None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
