# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that sleep until they have taken a given time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Sleeper:
    """Stretches what one rank does; what an operation really takes is part of its time."""

    def __init__(self) -> None:
        self._slept = 0.0

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long."""
        begin = time.perf_counter()
        time.sleep(seconds)
        self._slept += time.perf_counter() - begin

    @contextlib.contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """The block takes so long at least; what sleeps in it counts on top."""
        begin = self._awake()
        yield
        self.sleep(max(0.0, seconds - (self._awake() - begin)))

    def _awake(self) -> float:
        """Seconds on a clock that stands still while the rank sleeps here."""
        return time.perf_counter() - self._slept
