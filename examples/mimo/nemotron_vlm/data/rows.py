# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rows of the language model's batch, of one sample each or of as many as fit.

A row has the sequence length. It is a function of the source, the seed and its number alone, so it
does not depend on the ranks, and a run resumes at a row's number. With packing, the stream of
samples is cut into windows; the samples of a window are packed into as few rows as best-fit
decreasing finds (Johnson, "Fast algorithms for bin packing", 1974), and these rows are shuffled.
Windows differ in their number of rows, so a checkpoint has the rows before its window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from examples.mimo.nemotron_vlm.data.sample import SampleSource

if TYPE_CHECKING:
    from examples.mimo.nemotron_vlm.model.encoders import Encoder


SAMPLE, PLACE, ROWS, WORK, SIZE = range(5)
"""Columns of an array of inputs: number of the sample, place among its inputs, rows that the input
becomes, operations that it takes, and its size."""

COUNTED = 1024
"""Rows of single samples that stand for all; packed, a window's do."""


class Packing(NamedTuple):
    """Settings of packing, with the program's defaults.

    window: number of consecutive samples that are packed together.
    multiple: each sample is padded to a multiple of so many tokens; the layout's token multiple
    must divide it.
    """

    window: int = 1024
    multiple: int = 16

    def padded(self, tokens: int | np.ndarray) -> int | np.ndarray:
        """Return the lengths of samples, or of one, after padding."""
        return -(-tokens // self.multiple) * self.multiple


class Rows:
    """The rows of one split.

    Args:
        source: the samples, each of which fits a row.
        packing: None puts each sample into a row of its own.
        seed: seed of the order of packed rows.
        start: number of a window, and of the rows before it: the first row that is asked for is in
            this window or soon after it. Without it, the windows before that row are packed.
    """

    def __init__(
        self,
        source: SampleSource,
        split: str,
        seq_length: int,
        packing: Packing | None = None,
        seed: int = 0,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self.source, self.split, self.seq_length, self.packing = source, split, seq_length, packing
        self._seed, self._first = seed, start[0]
        self._before = [start[1]]  # rows before each window, from the first one on
        self._window: tuple[int, list[list[int]]] = (-1, [])
        # A window has the rows of many steps.
        self._costs = lru_cache(maxsize=4)(source.costs)
        self._inputs = lru_cache(maxsize=8)(self._read_inputs)

    def samples(self, first: int, count: int) -> list[list[int]]:
        """Return the sample numbers of each row from ``first`` to ``first + count - 1``."""
        if self.packing is None:
            return [[row] for row in range(first, first + count)]
        found: list[list[int]] = []
        while len(found) < count:
            window, before = self.window_of(first + len(found))
            found += self._packed(window)[first + len(found) - before :]
        return found[:count]

    def tokens(self, samples: list[list[int]]) -> list[np.ndarray]:
        """Return the tokens of each sample, int64 [samples] for each row."""
        low, high = self._bounds(samples)
        known = self._costs(self.split, low, high - low)[:, 0]
        return [known[np.array(row) - low] for row in samples]

    def inputs(self, samples: list[list[int]], encoder: Encoder, width: int) -> list[np.ndarray]:
        """Return an encoder's inputs in each row, int64 [inputs, 5]: columns `SAMPLE` to `SIZE`."""
        low, high = self._bounds(samples)
        ends, known = self._inputs(low, high, encoder, width)
        return [
            np.concatenate([known[ends[n - low] : ends[n - low + 1]] for n in row])
            for row in samples
        ]

    def _read_inputs(
        self, low: int, high: int, encoder: Encoder, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return an encoder's inputs of samples ``low`` to ``high - 1``, and the end of each's."""
        sizes = self.source.sizes(self.split, low, high - low, encoder.name)
        flat = np.concatenate(sizes)
        ends = np.cumsum([0, *map(len, sizes)])
        number = np.repeat(np.arange(low, high), np.diff(ends))
        place = np.arange(len(flat)) - np.repeat(ends[:-1], np.diff(ends))
        known = [number, place, encoder.rows(flat), encoder.operations(flat, width), flat]
        return ends, np.stack(known, axis=1)

    def _bounds(self, samples: list[list[int]]) -> tuple[int, int]:
        """Return the bounds of whole windows, or of the samples without them."""
        flat = [number for row in samples for number in row]
        window = self.packing.window if self.packing else 1
        return min(flat) // window * window, (max(flat) // window + 1) * window

    def first(self) -> list[list[int]]:
        """Return the sample numbers of the first rows, which stand for all."""
        return self._packed(0) if self.packing else self.samples(0, COUNTED)

    def window_of(self, row: int) -> tuple[int, int]:
        """Return the number of a packed row's window, and the number of rows before that window."""
        while self._before[-1] <= row:
            last = self._first + len(self._before) - 1
            self._before.append(self._before[-1] + len(self._packed(last)))
        place = bisect_right(self._before, row) - 1
        return self._first + place, self._before[place]

    def _packed(self, window: int) -> list[list[int]]:
        if self._window[0] != window:
            first = window * self.packing.window
            tokens = self._costs(self.split, first, self.packing.window)[:, 0]
            rows = best_fit(self.packing.padded(tokens).tolist(), self.seq_length)
            order = np.random.default_rng([self._seed, window]).permutation(len(rows))
            self._window = window, [[first + i for i in rows[place]] for place in order]
        return self._window[1]


def squares_of(tokens: list[np.ndarray]) -> np.ndarray:
    """Return the sum of the squared lengths in each row, float64 [rows], to which its attention is
    in proportion.

    Args:
        tokens: the samples' lengths, as `Rows.tokens` returns them.
    """
    return np.array([(of_row.astype(float) ** 2).sum() for of_row in tokens])


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack items, longest first, each into the bin in which it leaves the least room.

    Returns:
        Indices of the items of each bin, ascending.

    Raises:
        ValueError: an item is longer than a bin.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room and number of each bin, ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[item]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit a row of {capacity}")
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(place)
        bins[number].append(item)
        insort(rooms, (room - length, number))
    return [sorted(items) for items in bins]
