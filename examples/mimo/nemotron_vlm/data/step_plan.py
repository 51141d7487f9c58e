# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of what a rank reads for each microbatch of a step: rows of text, and tiles; plain data.

The bridge needs consecutive samples on each DP rank of either module, in one order of the batch:
here the order of the language model's DP ranks. Non-colocated, the bridge runs once per microbatch;
colocated, once per macro-batch, which with a pipeline is the whole batch. Colocated, the tiles of a
DP rank of the language model are cut into equal runs for the encoder ranks that serve it, so the
tiles of one sample may lie on two of them. Non-colocated, each encoder rank takes whole rows, as
upstream's bridge requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from examples.mimo.common.layout import Layouts
from examples.mimo.nemotron_vlm.data.balance import assign_rows, cut_evenly
from examples.mimo.nemotron_vlm.data.rows import Rows
from megatron.core.models.mimo.bridge.topology import atoms_of
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

RowCost = Callable[[Sequence[int]], float]
"""Cost for the language model of a row, from the tokens of each of its samples, in any unit."""


class Piece(NamedTuple):
    """Tiles ``first`` to ``end - 1`` of a sample."""

    sample: int
    first: int
    end: int


class Take(NamedTuple):
    """A rank's part of one microbatch.

    Args:
        split: 'train' or 'test'.
        rows: sample numbers of each row of tokens that the rank reads.
        pieces: tiles that the rank encodes; None if it has no encoder.
        atoms: number of tiles in each of the bridge's atoms that the rank encodes, and in each that
            it consumes, in this microbatch; None if modules are non-colocated.
    """

    split: str
    rows: list[list[int]]
    pieces: list[Piece] | None
    atoms: tuple[list[int], list[int]] | None


@dataclass(frozen=True)
class StepPlan:
    """One rank's share of every step.

    Args:
        layouts: layouts of both modules.
        encoder_part: index of the part of the batch that this rank encodes; None if it has no
            encoder.
        language_dp: this rank's DP coordinate in the language model's grid; None outside of it.
        row_cost: cost of a row, by which rows are balanced; None leaves them in the stream's order.
        schedule: when colocated modules encode.
    """

    layouts: Layouts
    encoder_part: int | None
    language_dp: int | None
    row_cost: RowCost | None = None
    schedule: EncoderSchedule = EncoderSchedule()

    def takes(self, rows: Rows, first: int, count: int, micro_size: int) -> Iterator[Take]:
        """Yield what this rank reads of one step, microbatch by microbatch.

        Args:
            rows: the rows of a split.
            first: number of the step's first row.
            count: number of microbatches of the step.
            micro_size: rows of a microbatch that a DP rank of the language model takes.
        """
        dp = self.layouts.language.dp
        samples = rows.samples(first, count * micro_size * dp)
        costs = rows.costs(samples)
        placed = self._placed(costs, count, dp)
        if self.layouts.non_colocated:
            yield from self._whole_rows(rows.split, samples, costs, placed)
            return
        size = self.schedule.at_once(self.layouts.language.pp, count)
        for number in range(0, count, size):
            yield from self._colocated(rows.split, samples, costs, placed[number : number + size])

    def _placed(self, costs: list[np.ndarray], count: int, dp: int) -> np.ndarray:
        if self.row_cost is None:
            return np.arange(len(costs)).reshape(count, dp, -1)
        language = [self.row_cost(cost[:, 0]) for cost in costs]
        return assign_rows(language, [int(cost[:, 1].sum()) for cost in costs], count, dp)

    def _whole_rows(self, split, samples, costs, placed) -> Iterator[Take]:
        for cell in placed:
            flat = cell.reshape(-1)
            if self.language_dp is not None:
                own = cell[self.language_dp]
                yield Take(split, [samples[row] for row in own], None, None)
                continue
            own = np.split(flat, self.layouts.encoder.dp)[self.encoder_part]
            pieces = [piece for row in own for piece in _pieces(samples[row], costs[row])]
            yield Take(split, [samples[row] for row in own], pieces, None)

    def _colocated(self, split, samples, costs, placed) -> Iterator[Take]:
        """Yield the takes of the microbatches of one macro-batch."""
        dp, parts = self.layouts.language.dp, self.layouts.encoder.dp
        a_run = len(atoms_of(0, dp, parts))
        encoded, counts = [], []
        for atom in atoms_of(self.encoder_part, parts, dp):
            run, place = divmod(atom, a_run)
            pieces = [p for row in placed[:, run].flat for p in _pieces(samples[row], costs[row])]
            bounds = cut_evenly(sum(p.end - p.first for p in pieces), a_run)
            encoded += _cut(pieces, bounds[place], bounds[place + 1])
            counts.append(bounds[place + 1] - bounds[place])
        mine = placed[:, self.language_dp]
        sizes = [sum(int(costs[row][:, 1].sum()) for row in rows) for rows in mine]
        run_bounds = cut_evenly(sum(sizes), a_run)
        shares = _between_samples(encoded, cut_evenly(sum(counts), len(placed)))
        ends = np.cumsum([0, *sizes])
        for number, rows in enumerate(mine):
            first, end = shares[number], shares[number + 1]
            yield Take(
                split,
                [samples[row] for row in rows],
                _cut(encoded, first, end),
                (
                    _overlaps(np.cumsum([0, *counts]), first, end),
                    _overlaps(run_bounds, ends[number], ends[number + 1]),
                ),
            )


def _pieces(samples: list[int], costs: np.ndarray) -> list[Piece]:
    return [Piece(s, 0, int(n)) for s, n in zip(samples, costs[:, 1], strict=True) if n]


def _cut(pieces: list[Piece], first: int, end: int) -> list[Piece]:
    """Return tiles ``first`` to ``end - 1`` of the concatenated ``pieces``."""
    found, before = [], 0
    for piece in pieces:
        low, high = max(first - before, 0), min(end - before, piece.end - piece.first)
        if low < high:
            found.append(Piece(piece.sample, piece.first + low, piece.first + high))
        before += piece.end - piece.first
    return found


def _between_samples(pieces: list[Piece], bounds: list[int]) -> list[int]:
    """Move each bound to the closest end of a piece, so that a rank decodes a sample only once."""
    ends = np.cumsum([0, *(piece.end - piece.first for piece in pieces)])
    return [int(ends[np.abs(ends - bound).argmin()]) for bound in bounds]


def _overlaps(bounds: Sequence[int], first: int, end: int) -> list[int]:
    """Return the overlap of ``first`` to ``end`` with each run between neighbouring bounds."""
    return [
        max(0, min(int(b), int(end)) - max(int(a), int(first)))
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
