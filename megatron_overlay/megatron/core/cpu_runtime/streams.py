# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a device on which every op has finished when its call returns.

Ordering between streams therefore always holds, and waits return at once. Events store the time at
which they are recorded, so intervals between them are real measurements.
"""

import threading
import time

import torch

_CURRENT = threading.local()


class Stream:
    """Stand-in for `torch.cuda.Stream`; distinct streams are distinct objects, all of them idle."""

    def __init__(self, device=None, priority: int = 0, **kwargs):
        self.device = torch.device("cpu")
        self.priority = priority

    def wait_stream(self, stream: "Stream") -> None:
        """Return at once: the work of `stream` is done."""

    def wait_event(self, event: "Event") -> None:
        """Return at once: the work before `event` is done."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event`, or a new one, now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """True: nothing is ever pending."""
        return True

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""

    def __enter__(self) -> "Stream":
        self._context = stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        self._context.__exit__(*exc_info)


class Event:
    """Stand-in for `torch.cuda.Event`: a point in host time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **kwargs):
        self.time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Remember the time."""
        self.time_s = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to `end_event`; RuntimeError unless both are recorded."""
        if self.time_s is None or end_event.time_s is None:
            raise RuntimeError("both events must be recorded before the time between them is read")
        return (end_event.time_s - self.time_s) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once: nothing is ever pending."""

    def query(self) -> bool:
        """True: nothing is ever pending."""
        return True

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""


_DEFAULT = Stream()


def default_stream(device=None) -> Stream:
    """The stream that is current until another one is set."""
    return _DEFAULT


def current_stream(device=None) -> Stream:
    """The stream that this thread set last, or the default stream."""
    return getattr(_CURRENT, "stream", _DEFAULT)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` this thread's current one; None changes nothing."""
    if stream is not None:
        _CURRENT.stream = stream


class StreamContext:
    """Stand-in for `torch.cuda.StreamContext`.

    Inside, `stream` is this thread's current stream; None changes nothing.
    """

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        self._previous = current_stream()
        set_stream(self.stream)

    def __exit__(self, *exc_info) -> None:
        set_stream(self._previous)


def stream(stream: Stream | None) -> StreamContext:
    """The context manager that makes `stream` current."""
    return StreamContext(stream)
