# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where a GPU's time goes, from the trace that PyTorch's profiler wrote of some steps."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

Interval = tuple[float, float]

WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of what a GPU does."""

RANGES = {"bridge": "mimo bridge", "optimizer": "Optimizer.step"}
"""Begin the names of ranges whose share of the time is told."""


@dataclass(frozen=True)
class Shares:
    """Of the profiled time, as fractions of it.

    total: the profiled time itself, in the trace's unit: µs where PyTorch wrote it.
    idle: no kernel runs, and none is copied: launch gaps and waits for the host.
    communication, exposed: NCCL's kernels run; and nothing else does.
    bridge, optimizer: from the first kernel of such a range to its last.
    kernels: the ten that take most time, with their names cut to 60 letters.
    """

    total: float
    idle: float
    communication: float
    exposed: float
    bridge: float
    optimizer: float
    kernels: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def read(path: Path) -> Shares | None:
    """The shares of a trace; None of one without a GPU.

    Args:
        path: Chrome's JSON, gzipped.
    """
    with gzip.open(path, "rt") as file:
        return shares(json.load(file)["traceEvents"])


def shares(events: list[dict]) -> Shares | None:
    """The shares of a trace's events, times in any unit."""
    spans = [event for event in events if event.get("ph") == "X"]
    work = [event for event in spans if event.get("cat") in WORK]
    steps = [span(e) for e in spans if e.get("name", "").startswith("ProfilerStep")]
    if not work or not steps:
        return None
    window = (min(first for first, _ in steps), max(end for _, end in steps))
    total = window[1] - window[0]

    def length(chosen: list[dict]) -> float:
        return sum(end - first for first, end in union(map(span, chosen), window)) / total

    sent = [event for event in work if event["name"].startswith("nccl")]
    computed = [event for event in work if not event["name"].startswith("nccl")]
    ranges = [event for event in spans if event.get("cat") == "gpu_user_annotation"]
    share = {
        name: length([event for event in ranges if event["name"].startswith(prefix)])
        for name, prefix in RANGES.items()
    }
    by_name = Counter()
    for event in work:
        by_name[event["name"][:60]] += event["dur"] / total
    return Shares(
        total=total,
        idle=1.0 - length(work),
        communication=length(sent),
        exposed=length(work) - length(computed),
        kernels=dict(by_name.most_common(10)),
        **share,
    )


def span(event: dict) -> Interval:
    """When an event began and ended."""
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: list[Interval], window: Interval) -> list[Interval]:
    """What is in any of the intervals, and in the window, as intervals that do not meet."""
    joined: list[Interval] = []
    for first, end in sorted(intervals):
        first, end = max(first, window[0]), min(end, window[1])
        if first >= end:
            continue
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((first, end))
    return joined
