# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tiles of another source as whole images and clips, for ``--dynamic-resolution``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data.sample import DigitTask, Text, reading_task
from examples.mimo.nemotron_vlm.model.names import FIRST_DIGIT, IMAGES

if TYPE_CHECKING:
    from examples.mimo.nemotron_vlm.model.encoders.radio import RadioOfAnySize

EIGHTHS = range(4, 11)
"""Heights and widths that a tile is resized to, in eighths of its own."""

FRAMES = (0, 0, 0, 1, 3, 4)
"""Frames that a tile becomes, of which one is drawn, if the model has video; 0 is an image."""


def most_rows(images: RadioOfAnySize) -> int:
    """Return the most rows that a resized tile becomes."""
    sides = [images.tile * part // 8 for part in EIGHTHS]
    shapes = [(frames, h, w) for frames in _frames(images) for h in sides for w in sides]
    return int(images.rows(np.array([_size(images, *shape) for shape in shapes])).max())


def _frames(images: RadioOfAnySize) -> tuple[int, ...]:
    return FRAMES if images.clips else FRAMES[:1]


def _size(images: RadioOfAnySize, frames: int, height: int, width: int) -> int:
    if frames:
        return images.clips.size_of(frames, height, width)
    return images.grids.size_of(height, width)


class WholeImages(DigitTask):
    """Samples whose images have random heights and widths.

    Every tile of the other source is an image; or in half of the samples, all tiles side by side
    are one. If the model has video, half of the images are the first frame of a clip, in which they
    move to the right, and around.

    Args:
        tiles: the other source; it should count `most_rows` for a tile.
    """

    def __init__(
        self, tiles: DigitTask, images: RadioOfAnySize, seq_length: int, seed: int
    ) -> None:
        self._tiles, self._images = tiles, images
        self._seq_length, self._seed = seq_length, seed
        bounds = f"{images.min_patches} to {images.max_patches} patches"
        self.fingerprint = f"{tiles.fingerprint}, whole images of {bounds}, seed {seed}"
        if images.clips:
            self.fingerprint += f", frames of {images.clip_patches} patches"

    def _shapes(self, split: str, number: int) -> np.ndarray:
        """Return frames, height and width in pixels of each image of a sample, int64 [images, 3].

        An image that is no clip has 0 frames.
        """
        tiles = int(self._tiles.costs(split, number, 1)[0, 1])
        draw = np.random.default_rng([self._seed, split == "test", number, 2])
        is_strip = tiles > 1 and draw.integers(2) == 1
        parts = draw.integers(EIGHTHS.start, EIGHTHS.stop, size=(1 if is_strip else tiles, 2))
        pixels = self._images.tile * parts // 8 * ((1, tiles) if is_strip else (1, 1))
        frames = draw.choice(_frames(self._images), (len(pixels), 1))
        return np.concatenate([frames, pixels], axis=1)

    def _sizes(self, split: str, number: int) -> np.ndarray:
        shapes = self._shapes(split, number).tolist()
        return np.array([_size(self._images, *shape) for shape in shapes], dtype=np.int64)

    def text(self, split: str, number: int) -> Text:
        rows = int(self._images.rows(self._sizes(split, number)).sum())
        _, labels, mask = (part.numpy() for part in self._tiles.text(split, number))
        answer = (labels[mask > 0][:-1] - FIRST_DIGIT).tolist()
        return reading_task(rows, answer, self._seq_length)

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """See `SampleSource`: the other source's, which a report shows."""
        return self._tiles.tiles(split, number)

    def sizes(self, split: str, first: int, count: int, encoder: str) -> list[np.ndarray]:
        if encoder != IMAGES:
            return super().sizes(split, first, count, encoder)
        return [self._sizes(split, number) for number in range(first, first + count)]

    def inputs(self, split: str, number: int, encoder: str) -> list[torch.Tensor]:
        if encoder != IMAGES:
            return []
        tiles = self._tiles.inputs(split, number, encoder)
        shapes = self._shapes(split, number).tolist()
        if len(shapes) < len(tiles):
            tiles = [torch.cat(list(tiles), dim=-1)]
        inputs = []
        for tile, (frames, *shape) in zip(tiles, shapes, strict=True):
            image = F.interpolate(tile[None].float(), shape, mode="bilinear")[0].byte()
            if frames:
                moved = [image.roll(frame * shape[1] // 4, -1) for frame in range(frames)]
                inputs.append(self._images.clips.cut(torch.stack(moved)))
            else:
                inputs.append(self._images.grids.cut(image))
        return inputs

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        costs = self._tiles.costs(split, first, count)
        numbers = range(first, first + count)
        tokens = [len(self.text(split, number).input_ids) for number in numbers]
        return np.stack([np.array(tokens, dtype=np.int64), costs[:, 1]], axis=1)
