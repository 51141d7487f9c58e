# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Shares of a GPU's time, from the trace that PyTorch's profiler wrote of some steps."""

import gzip
import json
from collections import Counter
from pathlib import Path

Interval = tuple[float, float]

WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of a GPU's work in a trace."""

RANGES = {"bridge": "mimo bridge", "optimizer": "Optimizer.step"}
"""Prefixes of the names of ranges whose share of the time is computed."""


LARGEST = 20
"""Kernels and gaps that are named, those that take longest."""


def read(path: Path) -> dict[str, float | dict[str, float]]:
    """Read the `shares` of a trace, a gzipped file in Chrome's JSON format."""
    with gzip.open(path, "rt") as file:
        return shares(json.load(file)["traceEvents"])


def shares(events: list[dict]) -> dict[str, float | dict[str, float]]:
    """Compute shares of the profiled time from a trace's events; empty if no GPU worked.

    total: the profiled time itself, in the trace's unit: µs where PyTorch wrote it.
    idle: nothing runs and nothing is copied: launch gaps and waits for the host.
    exposed: NCCL's kernels run, and nothing else does.
    bridge, optimizer: time from the first kernel of such a range to its last.
    kernels: those that take longest, by the first 80 characters of their name; several may run at
    once. gaps: idle time, by the work that ends it.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    work = [event for event in spans if event.get("cat") in WORK]
    steps = [span(e) for e in spans if e.get("name", "").startswith("ProfilerStep")]
    if not work or not steps:
        return {}
    window = (min(first for first, _ in steps), max(end for _, end in steps))
    total = window[1] - window[0]

    def length(chosen: list[dict]) -> float:
        return covered(list(map(span, chosen)), window) / total

    computed = [event for event in work if not event["name"].startswith("nccl")]
    ranges = [event for event in spans if event.get("cat") == "gpu_user_annotation"]
    found = {"total": total, "idle": 1.0 - length(work), "exposed": length(work) - length(computed)}
    for name, prefix in RANGES.items():
        found[name] = length([event for event in ranges if event["name"].startswith(prefix)])
    taken, gaps, until = Counter(), Counter(), window[0]
    for event in sorted(work, key=span):
        (first, end), name = span(event), event["name"][:80]
        taken[name] += covered([(first, end)], window)
        gaps[name] += max(0.0, min(first, window[1]) - until)
        until = max(until, end)
    for kind, times in {"kernels": taken, "gaps": gaps}.items():
        largest = times.most_common(LARGEST)
        found[kind] = {name: round(time / total, 4) for name, time in largest if time > 0}
    return found


def span(event: dict) -> Interval:
    """Return the begin and end of an event."""
    return event["ts"], event["ts"] + event["dur"]


def covered(intervals: list[Interval], window: Interval) -> float:
    """Return how much of the window the intervals cover together."""
    length, until = 0.0, window[0]
    for first, end in sorted(intervals):
        end = min(end, window[1])
        length += max(0.0, end - max(first, until))
        until = max(until, end)
    return length
