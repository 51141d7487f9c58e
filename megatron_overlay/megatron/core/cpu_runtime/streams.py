# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a device on which every op has finished when its call returns.

They are those of `torch.cpu`, whose waits return at once, with what `torch.cuda`'s have besides.
Events store the time at which they are recorded, so intervals between them are real measurements.
"""

import contextlib
import time
from collections.abc import Iterator

import torch


class Stream(torch.cpu.Stream):
    """Stand-in for `torch.cuda.Stream`; distinct streams are distinct objects, all of them idle."""

    def __init__(self, *args, **kwargs):
        super().__init__()

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event`, or a new one, now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True: nothing is ever pending."""
        return True

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""


class Event(torch.cpu.Event):
    """Stand-in for `torch.cuda.Event`: a point in host time."""

    def __init__(self, *args, **kwargs):
        self.time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Remember the time."""
        self.time_s = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return milliseconds until `end_event`; raise RuntimeError unless both are recorded."""
        if self.time_s is None or end_event.time_s is None:
            raise RuntimeError("both events must be recorded before the time between them is read")
        return (end_event.time_s - self.time_s) * 1e3


_DEFAULT = Stream()
_current = _DEFAULT


def default_stream(device=None) -> Stream:
    """Return the stream that is current until another one is set."""
    return _DEFAULT


def current_stream(device=None) -> Stream:
    """Return the stream that was set last, or the default stream."""
    return _current


def set_stream(stream: Stream | None) -> None:
    """Make `stream` the current one; None changes nothing."""
    global _current
    _current = stream or _current


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Inside, `stream` is the current one; None changes nothing."""
    before = _current
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
