# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A limit on tests that make no progress, however busy the machine is.

Progress is CPU time of the main threads of all ranks: threads of gloo's groups wake up in a rank
that waits, too. A collective has a limit of its own, which names its ranks.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

STILL_S = 240.0
"""Seconds in which all ranks together may use no more than `LEAST_S` of CPU time."""
LEAST_S = 0.5
MOST_S = 900.0
"""CPU seconds that the main thread of a rank may use for a test: one that never ends, but works."""
LOOK_S = 5.0
"""Seconds between two looks."""

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    """Return the CPU time of the main thread; 0 of a process that has ended."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/task/{process}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICK
    return 0.0


def ranks_and_theirs(launcher: int | None) -> list[int]:
    """Return all processes that a launcher has started, or this one and those that it has."""
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(launcher)
        started = [process.pid for process in top.children(recursive=True)]
        return started + [os.getpid()] * (launcher is None)
    return [os.getpid()]


@contextmanager
def watched(end: Callable[[str], object], launcher: int | None) -> Iterator[None]:
    """Call ``end`` with the reason if the block makes no progress, or works for ever.

    Args:
        launcher: process that has started the ranks; None if this one runs alone.
    """
    over = threading.Event()
    still_s, least_s, most_s, look_s = STILL_S, LEAST_S, MOST_S, LOOK_S  # also of a test of this

    def watch() -> None:
        began = cpu_seconds(os.getpid())
        before: dict[int, float] = {}
        still = 0.0
        used = 0.0
        while not over.wait(look_s):
            now = {process: cpu_seconds(process) for process in ranks_and_theirs(launcher)}
            used += sum(max(0.0, now[one] - before.get(one, 0.0)) for one in now)
            before = now
            still = still + look_s if used < least_s else 0.0
            used = 0.0 if used >= least_s else used
            if still >= still_s:
                end(f"no rank has worked for {still_s:.0f} s")
            if cpu_seconds(os.getpid()) - began > most_s:
                end(f"it has worked for over {most_s:.0f} s of CPU time")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
