# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Processes of an asynchronous save, which end with their rank, and the queue of its results."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import Process
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.managers import SyncManager
from multiprocessing.queues import JoinableQueue
from queue import Queue
from types import ModuleType

END_WITH_RANK = """
import multiprocessing, os, threading

def watch():
    multiprocessing.parent_process().join()
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()
"""
"""Code of the watcher thread, as text so that spawned processes need not import Megatron."""


def end_with_rank() -> None:
    """End this process when the rank that started it ends, even if it is killed.

    The rank need not be its parent, which may be a fork server.
    """
    exec(END_WITH_RANK, {})


def start_deaf(process: Process) -> None:
    """Start a process that ignores the signals which this one handles; call it in the main thread.

    A signal that asks ranks to save and leave may go to all processes of a job. It would end a
    writer, and the last save would wait for it for ever. SIGINT and SIGTERM end it as they should.
    """
    handled = {
        number: signal.getsignal(number)
        for number in signal.valid_signals() - {signal.SIGINT, signal.SIGTERM}
        if callable(signal.getsignal(number))
    }
    for number in handled:
        signal.signal(number, signal.SIG_IGN)
    process.start()
    for number, handler in handled.items():
        signal.signal(number, handler)


def join(queue: JoinableQueue, process: Process) -> None:
    """Wait until a process is done with all that is in a queue, or has ended."""
    waiting = threading.Thread(target=queue.join, daemon=True)
    waiting.start()
    while waiting.is_alive() and process.is_alive():
        waiting.join(1)


def discard(queue: JoinableQueue) -> None:
    """Empty a queue whose reading process was killed, and end the thread that fills it.

    At its end this process waits for that thread, which waits for room in the pipe. Bytes are read
    as they are: the other process may have had a part of an object, and the lock of the reader.
    """
    with Connection(os.dup(queue._reader.fileno()), writable=False) as reader:
        queue.close()  # ends the thread once the pipe has had all
        while queue._thread is not None and queue._thread.is_alive():
            if reader.poll(0.1):
                os.read(reader.fileno(), 2**16)


def managed_queue(context: BaseContext) -> Queue:
    """Return a queue whose manager process ends when this one does, even if this one is killed."""
    manager = SyncManager(ctx=context)
    manager.start(exec, (END_WITH_RANK, {}))
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
