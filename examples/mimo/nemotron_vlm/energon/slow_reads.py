# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads that do not end: a thread of each process names them in the log, after growing pauses."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_S = 30
"""Seconds after which a read is named; then after twice as many, and so on."""

logger = logging.getLogger(__name__)


class SlowReads:
    """Watches the read that a process carries out; forked processes have watches of their own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._read: tuple[str, float] | None = None

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Watch the read of ``what`` inside the block."""
        if self._thread is None or not self._thread.is_alive():  # after a fork, it is not
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        self._read = what, time.monotonic()
        try:
            yield
        finally:
            self._read = None

    def _watch(self) -> None:
        watched, limit = None, FIRST_S
        while True:
            threading.Event().wait(FIRST_S / 10)
            if self._read is not watched:
                watched, limit = self._read, FIRST_S
            if watched and time.monotonic() - watched[1] >= limit:
                logger.warning("%s: its read has not ended after %g s", watched[0], limit)
                limit *= 2


slow_reads = SlowReads()
