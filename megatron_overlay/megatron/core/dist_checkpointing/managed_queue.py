# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Processes of an asynchronous save, which end with their rank, and the queue of its results."""

import threading
from multiprocessing import Process
from multiprocessing.context import BaseContext
from multiprocessing.managers import SyncManager
from multiprocessing.queues import JoinableQueue
from queue import Queue
from typing import Any

END_WITH_RANK = """
import multiprocessing, os, signal, threading

def watch():
    multiprocessing.parent_process().join()
    os._exit(1)

for number in (signal.SIGUSR1, signal.SIGUSR2):  # they ask ranks to save, maybe all processes
    signal.signal(number, signal.SIG_IGN)
threading.Thread(target=watch, daemon=True).start()
"""
"""Code of `end_with_rank`, as text so that spawned processes need not import Megatron."""


def end_with_rank() -> None:
    """End this process when the rank that started it ends, even if it is killed.

    The rank need not be its parent, which may be a fork server.
    """
    exec(END_WITH_RANK, {})


def join(queue: JoinableQueue, process: Process) -> None:
    """Wait until a process is done with all that is in a queue, or has ended."""
    waiting = threading.Thread(target=queue.join, daemon=True)
    waiting.start()
    while waiting.is_alive() and process.is_alive():
        waiting.join(1)


class ResultsQueue:
    """Queue of a save's results, in this process or, once shared, in a manager process."""

    _manager: SyncManager | None = None

    def __init__(self, context: BaseContext) -> None:
        self._context, self._queue = context, Queue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def __reduce__(self) -> tuple:
        return self._queue.__reduce__()

    def share(self) -> None:
        """Move to the manager, so that another process can be sent the queue; it is empty."""
        if ResultsQueue._manager is None:
            ResultsQueue._manager = SyncManager(ctx=self._context)
            ResultsQueue._manager.start(exec, (END_WITH_RANK, {}))
        self._queue = ResultsQueue._manager.Queue()
