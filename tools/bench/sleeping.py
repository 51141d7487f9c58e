# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Padding of operations with sleep, so that each takes a given time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Sleeper:
    """Stretches one rank's operations; the real time of an operation is part of its given time."""

    def __init__(self) -> None:
        self._slept = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep, and count it as time asleep."""
        begin = time.perf_counter()
        time.sleep(seconds)
        self._slept += time.perf_counter() - begin

    @contextlib.contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Make the block take ``seconds`` or more; sleep inside it is added on top."""
        begin = self._awake()
        yield
        self.sleep(max(0.0, seconds - (self._awake() - begin)))

    def _awake(self) -> float:
        """Return the seconds of a clock that stops while this object sleeps."""
        return time.perf_counter() - self._slept
