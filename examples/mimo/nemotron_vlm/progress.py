# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where this rank is: what it does and since when, for the report of a fault."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Progress(NamedTuple):
    """What the rank does.

    what: in a few words.
    since: ``time.monotonic()`` when it began.
    patience: how many times longer than a step's part it may take.
    """

    what: str
    since: float
    patience: int


_now = Progress("starting", time.monotonic(), 3)
_times_longer = 1
_done_before: set[str] = set()


def note(what: str, patience: int = 1) -> None:
    """Say what this rank does from now on; cheap."""
    global _now
    _now = Progress(what, time.monotonic(), patience * _times_longer)


@contextmanager
def first_time(kind: str, patience: int) -> Iterator[None]:
    """The first time that ``kind`` is done, all in it may take ``patience`` times longer."""
    global _times_longer
    _times_longer = 1 if kind in _done_before else patience
    try:
        yield
    finally:
        _times_longer = 1
        _done_before.add(kind)


def now() -> Progress:
    """What it does."""
    return _now
