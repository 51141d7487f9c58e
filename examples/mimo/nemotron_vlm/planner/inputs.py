# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The images, clips and sounds of the rows of tokens.

The survey gives the sizes in the first rows that training would read. Where the shards are not
there, rows are full of images, as mock samples are; ``--data digits:N`` has N tiles a row.
"""

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.data import (
    DIGITS,
    SOURCES,
    digits_of_strip,
    make_source,
    path_of,
)
from examples.mimo.nemotron_vlm.data.rows import SIZE, Packing, Rows
from examples.mimo.nemotron_vlm.model.encoders import Encoder
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart
from examples.mimo.nemotron_vlm.model.presets import VLMPreset


class Inputs:
    """An encoder's inputs in some rows of tokens, which stand for all rows.

    Args:
        rows: sizes of the inputs of each row, int64 [inputs].
    """

    def __init__(self, encoder: Encoder, rows: list[np.ndarray]) -> None:
        self.encoder, self.sizes, self._rows = encoder, np.concatenate(rows), len(rows)
        self._row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])

    def mean(self, values: np.ndarray, rows: float = 1.0) -> float:
        """Return the mean of ``rows`` rows for values of each input, [inputs]; half a row has at
        least one input."""
        found = rows * float(values.sum()) / self._rows
        return max(found, float(values.mean())) if rows < 1 and len(values) else found

    def most(self, values: np.ndarray, rows: float) -> float:
        """Return the most that ``rows`` rows in succession have, for values of each input.

        Half a row has half of its inputs, and at least one.
        """
        if not len(values):
            return 0.0
        count = math.ceil(rows)
        of_row = np.bincount(self._row, values, self._rows)
        before = np.cumsum([0.0, *np.resize(of_row, max(count, self._rows))])
        sums = before[count:] - before[:-count]
        return float(max(sums.max() * rows / count, values.max()))

    def most_kept(
        self, own: Layout, rows: float, frozen: frozenset[ModelPart], *ends: bool
    ) -> float:
        """Return the most elements that a rank of one stage keeps of the inputs of ``rows`` rows.

        A frozen encoder keeps nothing, but its projector may still be trained.

        Args:
            ends: whether the stage is its pipeline's first, and its last; both by default.
        """
        encoder, (first, last) = self.encoder, ends or (True, True)
        if (encoder.name, "encoder") in frozen:
            if (encoder.name, "projector") in frozen:
                return 0.0
            encoder, first = replace(encoder, layers=0), False
        return self.most(encoder.kept(self.sizes, own, first, last), rows)


def inputs_of(args: Namespace, preset: VLMPreset) -> tuple[Inputs, ...]:
    """Return the inputs of each encoder.

    Raises:
        UserError: the data cannot be opened, or the inputs do not fit the sequence.
    """
    path = path_of(args.data)
    is_there = Path(path).exists() if path else args.data.partition(":")[0] not in SOURCES
    opened = args if is_there else Namespace(**vars(args) | {"data": "mock"})
    packing = Packing(args.pack_window, args.sample_multiple) if args.pack and is_there else None
    tiles = args.data.partition(DIGITS)[2]
    rows = Rows(make_source(opened, preset), "train", args.seq_length, packing, args.seed)
    first, width = rows.first(), preset.language.hidden_size
    found = [
        Inputs(each, [np.full(digits_of_strip(tiles), each.usual)])  # drawing scans would take long
        if tiles and each.name == IMAGES
        else Inputs(each, [row[:, SIZE] for row in rows.inputs(first, each, width)])
        for each in preset.encoders
    ]
    tokens = sum(each.mean(each.encoder.rows(each.sizes)) for each in found)
    if tokens > args.seq_length:
        what = f"{words_of(preset, found)}: {tokens:.0f} tokens"
        raise UserError(f"{what} do not fit --seq-length {args.seq_length}")
    return tuple(found)


def words_of(preset: VLMPreset, inputs: tuple[Inputs, ...] | list[Inputs]) -> str:
    """Return the inputs of a mean row as words, and the patches of the largest."""
    counts = (f"{each.mean(np.ones(len(each.sizes))):.3g} {each.encoder.plural}" for each in inputs)
    images = inputs[preset.names.index(IMAGES)]
    patches = preset.images.count_patches(images.sizes)
    largest = f"{images.mean(patches):,.0f} patches, the largest {images.most(patches, 1):,.0f}"
    return f"{', '.join(counts)} a row ({largest})"
