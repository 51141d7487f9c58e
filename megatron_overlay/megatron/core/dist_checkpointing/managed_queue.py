# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Processes of an asynchronous save, which end with their rank, and the queue of its results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from multiprocessing.managers import SyncManager
from queue import Queue
from types import ModuleType

_END_WITH_RANK = """
import multiprocessing, os, threading

def watch():
    multiprocessing.parent_process().join()
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()
"""
"""Code of the watcher thread, as text so that the spawned manager need not import Megatron."""


def end_with_rank() -> None:
    """End this process when the rank that started it ends, even if it is killed.

    The rank need not be its parent, which may be a fork server.
    """
    exec(_END_WITH_RANK, {})


def managed_queue(context: BaseContext) -> Queue:
    """A queue whose manager process ends when this process does, even if this one is killed.

    Args:
        context: multiprocessing context that starts the process.
    """
    manager = SyncManager(ctx=context)
    manager.start(exec, (_END_WITH_RANK, {}))
    return manager.Queue()


@contextlib.contextmanager
def results_in_this_process(writing: ModuleType) -> Iterator[None]:
    """Inside, new writers write in this process, and put their results into a plain queue in it.

    Args:
        writing: module that makes the writers and holds the queue of their results.
    """
    before = writing._results_queue
    writing._results_queue = Queue()
    try:
        yield
    finally:
        writing._results_queue = before
