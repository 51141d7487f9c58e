# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The inputs of a row of tokens, as the planner counts them: images, clips of video, and sounds.

They are those of the data, if ``--data`` names shards that are there. Otherwise they are of the
usual size: as many images as the row holds, beside one input of each other encoder.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.data import ENERGON, make_source
from examples.mimo.nemotron_vlm.data.rows import SIZE, WORK, Packing, Rows
from examples.mimo.nemotron_vlm.data.sample import IMAGES, most_tiles
from examples.mimo.nemotron_vlm.encoders import Encoder
from examples.mimo.nemotron_vlm.model.presets import VLMPreset


@dataclass(frozen=True)
class Inputs:
    """An encoder's inputs in a row.

    mean, deviation: their number; the deviation counts inputs of mean work. sizes: those of some
    inputs, whose means the planner takes; the usual one if there are none.
    """

    mean: float
    deviation: float = 0.0
    sizes: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Inputs:
        """Parse N[:CHANCE],…, numbers of tiles with their chances, which need not add up to 1.

        Raises:
            UserError: a part is something else.
        """
        chances = {}
        for part in text.split(","):
            count, _, chance = part.partition(":")
            try:
                chances[int(count)] = float(chance or 1)
            except ValueError:
                raise UserError(f"--plan-tiles {text}: {part} is not N or N:CHANCE") from None
        if min(chances) < 0 or not min(chances.values()) > 0:
            raise UserError(f"--plan-tiles {text}: tiles must be 0 or more, chances above 0")
        counts, weights = list(chances), list(chances.values())
        mean = float(np.average(counts, weights=weights))
        return cls(mean, float(np.average((np.array(counts) - mean) ** 2, weights=weights)) ** 0.5)

    @classmethod
    def of_rows(cls, rows: list[np.ndarray]) -> Inputs:
        """Count the inputs of rows, as `Rows.inputs` returns them."""
        flat = np.concatenate(rows)
        if not len(flat):
            return cls(0.0)
        work = np.array([row[:, WORK].sum() for row in rows]) / flat[:, WORK].mean()
        return cls(len(flat) / len(rows), float(work.std()), tuple(flat[:, SIZE].tolist()))

    def sizes_for(self, encoder: Encoder) -> np.ndarray:
        """Return the sizes, int64 [inputs]."""
        return np.array(self.sizes or (encoder.usual,), np.int64)


class Mean(NamedTuple):
    """Means of an encoder's inputs: rows, operations by kind, elements that TP ranks sum."""

    rows: float
    work: dict[str, float]
    reduced: float

    @property
    def operations(self) -> float:
        """Operations of forward and backward."""
        return sum(self.work.values())


@cache
def mean_of(encoder: Encoder, inputs: Inputs, width: int) -> Mean:
    """Return the means of an encoder's inputs; ``width`` is the language model's hidden size."""
    sizes = inputs.sizes_for(encoder)
    work = {kind: float(each.mean()) for kind, each in encoder.work(sizes, width).items()}
    return Mean(float(encoder.rows(sizes).mean()), work, float(encoder.reduced(sizes).mean()))


@cache
def kept_of(encoder: Encoder, inputs: Inputs, own: Layout, first: bool, last: bool) -> float:
    """Return the mean elements that a rank of one stage keeps of an input; see `Encoder.kept`."""
    return float(encoder.kept(inputs.sizes_for(encoder), own, first, last).mean())


def operations_of_row(preset: VLMPreset, inputs: Iterable[Inputs]) -> float:
    """Return the operations of all encoders for a row, forward and backward."""
    pairs = zip(preset.encoders, inputs, strict=True)
    width = preset.language.hidden_size
    return sum(each.mean * mean_of(encoder, each, width).operations for encoder, each in pairs)


def inputs_of(args: Namespace, preset: VLMPreset) -> tuple[Inputs, ...]:
    """Return the inputs of each encoder that the program's options ask for.

    Raises:
        UserError: the data cannot be opened, or the inputs do not fit the sequence.
    """
    own, _, path = args.data.partition(ENERGON)
    if path and not own and Path(path).exists():
        packing = Packing(args.pack_window, args.sample_multiple) if args.pack else None
        rows = Rows(make_source(args, preset), "train", args.seq_length, packing, args.seed)
        width = preset.language.hidden_size
        first = rows.first()
        counted = [Inputs.of_rows(rows.inputs(first, each, width)) for each in preset.encoders]
    else:
        counted = list(most_that_fit(preset, args.seq_length))
    if args.plan_tiles:
        counted[preset.names.index(IMAGES)] = Inputs.parse(args.plan_tiles)
    check(preset, counted, args.seq_length)
    return tuple(counted)


def most_that_fit(preset: VLMPreset, seq_length: int) -> tuple[Inputs, ...]:
    """Return inputs of the usual size: as many images as the tokens allow, as mock samples have.

    An encoder of something else has one input, so short that half of the tokens are left.
    """
    found, room = {}, seq_length
    for each in preset.encoders:
        if each.name != IMAGES:
            size = each.usual
            while size > 1 and each.rows(np.array([size]))[0] > seq_length / 2:
                size //= 2
            found[each.name] = Inputs(1.0, sizes=(size,))
            room -= int(each.rows(np.array([size]))[0])
    images = mean_of(preset.images, Inputs(1.0), preset.language.hidden_size).rows
    found[IMAGES] = Inputs(float(max(1, most_tiles(int(images), room))))
    return tuple(found[name] for name in preset.names)


def check(preset: VLMPreset, inputs: Iterable[Inputs], seq_length: int) -> None:
    """Refuse more inputs than a row has tokens for."""
    means = [
        (each.mean, mean_of(encoder, each, 1).rows, encoder.plural)
        for encoder, each in zip(preset.encoders, inputs, strict=True)
    ]
    if sum(mean * rows for mean, rows, _ in means) > seq_length:
        named = (f"{mean:g} {plural} of {rows:g} tokens" for mean, rows, plural in means if mean)
        raise UserError(f"{' and '.join(named)} do not fit --seq-length {seq_length}")


def words_of(preset: VLMPreset, inputs: Iterable[Inputs]) -> str:
    """Return the number of inputs of each encoder, as words."""
    return ", ".join(
        f"{each.mean:.3g}{f'±{each.deviation:.1f}' * (each.deviation > 0)} {encoder.plural}"
        for encoder, each in zip(preset.encoders, inputs, strict=True)
    )
