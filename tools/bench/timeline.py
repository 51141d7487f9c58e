# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Record the spans of each rank's work, and draw them, one row per rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()

COLOURS = {
    "encoder forward": "#5b8ff9",
    "encoder backward": "#1d39c4",
    "bridge": "#f6bd16",
    "language forward": "#5ad8a6",
    "language backward": "#237804",
}
"""Colours of the phases; grey is waiting."""

Span = tuple[str, float, float]
"""A span: phase, begin and end in seconds since the recording began."""


class Recorder:
    """Spans of one rank's work, on the device's own clock."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, object, object]] = []
        dist.barrier()
        self._begin = self.now()

    @staticmethod
    def now():
        """Return this moment: an event in the current stream, or the CPU's time."""
        if not CUDA:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as phase ``name``."""
        begin = self.now()
        yield
        self.add(name, begin)

    def add(self, name: str, begin, end=None) -> None:
        """Record phase ``name`` from ``begin`` to ``end``, by default now."""
        self._marks.append((name, begin, end or self.now()))

    def spans(self) -> list[Span]:
        """Return all spans, in the order of their ends."""
        if CUDA:
            torch.cuda.synchronize()
        return [(name, self._since(begin), self._since(end)) for name, begin, end in self._marks]

    def _since(self, mark) -> float:
        if isinstance(mark, float):
            return mark - self._begin
        return self._begin.elapsed_time(mark) / 1e3


def draw(
    path: Path,
    rows: dict[str, list[list[Span]]],
    names: list[str] | None = None,
    bound: float | None = None,
) -> None:
    """Write a picture of each schedule's spans by rank, on a common time axis.

    Args:
        rows: each rank's spans, by title of the schedule.
        names: labels instead of "rank 0" and so on.
        bound: lower bound, in seconds, of any schedule with the encoder in bubbles.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = len(next(iter(rows.values())))
    figure, all_axes = plt.subplots(
        len(rows), 1, sharex=True, figsize=(11, len(rows) * (0.9 + 0.4 * ranks)), squeeze=False
    )
    for axes, (title, by_rank) in zip(all_axes.flat, rows.items(), strict=True):
        for rank, spans in enumerate(by_rank):
            end = max(end for _, _, end in spans)
            axes.broken_barh([(0, 1e3 * end)], (rank - 0.4, 0.8), color="#d9d9d9")
            for name, begin, end in spans:
                bar = (1e3 * begin, 1e3 * (end - begin))
                axes.broken_barh(
                    [bar], (rank - 0.4, 0.8), color=COLOURS[name], edgecolor="white", linewidth=0.4
                )
        if bound is not None:
            axes.axvline(1e3 * bound, color="#cf1322", linestyle="--")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(ranks), names or [f"rank {rank}" for rank in range(ranks)])
        axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    handles.append(plt.Rectangle((0, 0), 1, 1, color="#d9d9d9"))
    labels = [*COLOURS, "waiting"]
    if bound is not None:
        handles.append(plt.Line2D([], [], color="#cf1322", linestyle="--"))
        labels.append("L + max(E, L(p-1)/m)")
    figure.legend(handles, labels, ncols=len(labels), loc="lower center", fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
