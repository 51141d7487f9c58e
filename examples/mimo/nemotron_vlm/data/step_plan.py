# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of what a rank reads for each microbatch of a step: rows of text, and inputs; plain data.

The bridges need consecutive samples on each DP rank of either module, in one order of the batch:
here the order of the language model's DP ranks. Non-colocated, a bridge runs once per microbatch;
colocated, once per macro-batch, which with a pipeline is the whole batch. Colocated, an encoder's
inputs of a DP rank of the language model are cut into equal runs for the encoder ranks that serve
it, so the inputs of one sample may lie on two of them. Non-colocated, each encoder rank takes whole
rows, as upstream's bridge requires.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from examples.mimo.common.layout import Layouts
from examples.mimo.nemotron_vlm.data.balance import assign_rows, cut_evenly, in_turns
from examples.mimo.nemotron_vlm.data.rows import PLACE, ROWS, SAMPLE, WORK, Rows, squares_of
from examples.mimo.nemotron_vlm.model.encoders import Encoder
from megatron.core.models.mimo.bridge.topology import atoms_of
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.forward.flops import StepWork

Inputs = list[np.ndarray]
"""An encoder's inputs in each row of a step, as `Rows.inputs` returns them."""


class InputRange(NamedTuple):
    """Inputs ``first`` to ``end - 1`` of a sample."""

    sample: int
    first: int
    end: int


class Share(NamedTuple):
    """A rank's part of one encoder's inputs in one microbatch.

    Args:
        ranges: inputs that the rank encodes; None if it does not have the encoder.
        encoded, consumed: number of rows in each of the bridge's atoms that the rank encodes, and
            in each that it consumes; None if modules are non-colocated.
    """

    ranges: list[InputRange] | None
    encoded: np.ndarray | None = None
    consumed: np.ndarray | None = None


class Take(NamedTuple):
    """A rank's part of one microbatch.

    Args:
        split: 'train' or 'test'.
        rows: sample numbers of each row of tokens that the rank reads.
        shares: the rank's part of each encoder's inputs, by the encoder's name.
        work: work of the whole step.
    """

    split: str
    rows: list[list[int]]
    shares: dict[str, Share]
    work: StepWork


@dataclass(frozen=True)
class StepPlan:
    """One rank's share of every step.

    Args:
        encoders: entries, in the order of ``layouts.encoders``.
        encoder_parts: for each encoder, in this order, the index of the part of the batch that this
            rank encodes; None if the rank does not have it.
        language_dp: this rank's DP coordinate in the language model's grid; None outside of it.
        balance: whether rows are balanced by their cost, instead of left in the stream's order.
        schedule: when colocated modules encode.
    """

    layouts: Layouts
    encoders: tuple[Encoder, ...]
    encoder_parts: Mapping[str, int | None]
    language_dp: int | None
    width: int
    balance: bool = False
    schedule: EncoderSchedule = EncoderSchedule()

    def takes(self, rows: Rows, first: int, count: int, micro_size: int) -> Iterator[Take]:
        """Yield what this rank reads of one step, microbatch by microbatch.

        Args:
            micro_size: rows of a microbatch that a DP rank of the language model takes.
        """
        dp, apart = self.layouts.language.dp, self.layouts.non_colocated
        samples = rows.samples(first, count * micro_size * dp)
        inputs = {each.name: rows.inputs(samples, each, self.width) for each in self.encoders}
        work = sum(np.array([row[:, WORK].sum() for row in each]) for each in inputs.values())
        # What packed rows cost beyond what all rows cost alike: their attention.
        squares, packed = np.zeros(len(samples)), None
        if rows.packing:
            tokens = rows.tokens(samples)
            squares = squares_of(tokens)
            packed = float(sum(map(np.sum, tokens)) / len(tokens)), float(squares.mean())
        placed = np.arange(len(samples)).reshape(count, dp, -1)
        size = 1 if apart else self.schedule.at_once(self.layouts.language.pp, count)
        if self.balance:
            placed = assign_rows(squares, work, count, dp)
            if not apart and size < count:
                placed = in_turns(placed, work)
        for number in range(0, count, size):
            cells = placed[number : number + size]
            shares = {
                each.name: self._whole_rows(each.name, layout.dp, inputs[each.name], cells[0])
                if apart
                else self._colocated(each.name, layout.dp, inputs[each.name], cells)
                for each, layout in zip(self.encoders, self.layouts.encoders, strict=True)
            }
            for place, cell in enumerate(cells):
                own = [samples[row] for row in self._own(cell)]
                used = {name: s[place] for name, s in shares.items()}
                yield Take(rows.split, own, used, StepWork(float(work.mean()), packed))

    def _own(self, cell: np.ndarray) -> np.ndarray:
        """Return the rows of a microbatch whose text the rank reads."""
        if self.language_dp is not None:
            return cell[self.language_dp]
        return next(
            np.split(cell.reshape(-1), layout.dp)[part]
            for layout, part in zip(self.layouts.encoders, self.encoder_parts.values(), strict=True)
            if part is not None
        )

    def _whole_rows(self, name: str, dp: int, inputs: Inputs, cell: np.ndarray) -> list[Share]:
        """Return the share of a non-colocated encoder in one microbatch."""
        part = self.encoder_parts[name]
        if part is None:
            return [Share(None)]
        own = np.split(cell.reshape(-1), dp)[part]
        return [Share(_ranges(np.concatenate([inputs[row] for row in own])))]

    def _colocated(self, name: str, parts: int, inputs: Inputs, cells: np.ndarray) -> list[Share]:
        """Return the shares of the microbatches of one macro-batch."""
        dp = self.layouts.language.dp
        a_run = len(atoms_of(0, dp, parts))
        encoded, counts = [], []
        for atom in atoms_of(self.encoder_parts[name], parts, dp):
            run, place = divmod(atom, a_run)
            whole = np.concatenate([inputs[row] for row in cells[:, run].flat])
            bounds = cut_evenly(whole[:, WORK], a_run)
            encoded.append(whole[bounds[place] : bounds[place + 1]])
            counts.append(len(encoded[-1]))
        made, made_bounds = np.concatenate(encoded), np.cumsum([0, *counts])
        own = cells[:, self.language_dp]
        used = np.concatenate([inputs[row] for row in own.flat])
        used_bounds = cut_evenly(used[:, WORK], a_run)
        shares = _between_samples(made, made_bounds, len(cells))
        ends = np.cumsum([0, *(sum(len(inputs[row]) for row in rows) for rows in own)])
        return [
            Share(
                _ranges(made[shares[number] : shares[number + 1]]),
                _rows_between(made, made_bounds, *shares[number : number + 2]),
                _rows_between(used, used_bounds, *ends[number : number + 2]),
            )
            for number in range(len(cells))
        ]


def _ranges(inputs: np.ndarray) -> list[InputRange]:
    """Return runs of inputs of one sample."""
    starts = np.flatnonzero(np.diff(inputs[:, SAMPLE], prepend=-1))
    return [
        InputRange(int(run[0, SAMPLE]), int(run[0, PLACE]), int(run[-1, PLACE]) + 1)
        for run in np.split(inputs, starts)[1:]
    ]


def _between_samples(inputs: np.ndarray, bounds: np.ndarray, count: int) -> np.ndarray:
    """Return the bounds of ``count`` nearly equal runs, of which none begins within a sample.

    So a rank decodes a sample only once, unless one of ``bounds`` cuts it.
    """
    starts = np.flatnonzero(np.diff(inputs[:, SAMPLE], prepend=-1))
    ends = np.union1d(starts, [0, *bounds])
    even = [len(inputs) * number // count for number in range(count + 1)]
    return np.array([ends[np.abs(ends - bound).argmin()] for bound in even])


def _rows_between(inputs: np.ndarray, bounds: np.ndarray, first: int, end: int) -> np.ndarray:
    """Return the rows of inputs ``first`` to ``end - 1`` in each run between ``bounds``."""
    before = np.cumsum([0, *inputs[:, ROWS]])
    return np.diff(before[np.clip(bounds, first, end)])
