# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A queue for write results in a process that does not outlive the one it works for."""

from __future__ import annotations

from multiprocessing.context import BaseContext
from multiprocessing.managers import SyncManager
from queue import Queue

_END_WITH_PARENT = """
import os, threading, time

def watch(parent):
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)

threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
"""
"""Code as text: the manager's process, which is spawned, then need not import Megatron."""


def managed_queue(context: BaseContext) -> Queue:
    """A queue whose process ends when this one does, even if it is killed.

    Args:
        context: how to start the process.
    """
    manager = SyncManager(ctx=context)
    manager.start(exec, (_END_WITH_PARENT, {}))
    return manager.Queue()
