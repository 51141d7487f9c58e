# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of images, clips and sounds, and the rows that they become; a survey needs them, too.

Images of any size and the frames of clips are resized to grids of patches, as Nemotron 3 Nano
Omni's processor does. A *tubelet* of a clip is some frames in a row, two as released, which are
embedded together and attend to themselves alone.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange

SAMPLING_RATE = 16000
"""Samples of a sound in a second."""

HOP = 160
"""Samples from one log-mel frame to the next."""

SHORTEST = 2 * HOP
"""Samples of the shortest sound: frames are scaled by their deviation."""

BITS = 16
"""Bits of a size that hold the columns of a grid; as many above them hold its rows, and those above
hold the tubelets of a clip: none of an image."""


def rows_of_sounds(samples: np.ndarray, subsampling: int) -> np.ndarray:
    """Return the rows that sounds become, int64 [sounds].

    Args:
        samples: of each sound, int64 [sounds].
        subsampling: log-mel frames that become a row.
    """
    return samples // (HOP * subsampling) + 1


def packed_size(tubelets: int, rows: int, columns: int) -> int:
    """Return the size, as data sources give it, of an image or a clip."""
    return (tubelets << BITS | rows) << BITS | columns


def grids_of(sizes: np.ndarray) -> np.ndarray:
    """Return the grids, int64 [inputs, 2], of sizes of images and clips."""
    return np.stack([sizes >> BITS, sizes], axis=1) & (1 << BITS) - 1


def tubelets_of(sizes: np.ndarray) -> np.ndarray:
    """Return the tubelets of images and clips by their sizes, int64 [inputs]; an image has none."""
    return sizes >> 2 * BITS


def resized(images: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return images [n, 3, H, W] with a height and width, in fp32, resized as released."""
    if images.shape[2:] == shape:
        return images.float()
    smooth = {"mode": "bicubic", "antialias": True, "align_corners": False}
    return F.interpolate(images.float(), shape, **smooth)


@dataclass(frozen=True)
class PatchGrids:
    """Settings of the grids.

    patch: height and width of a patch in pixels. pixel_shuffle: height and width in patches of a
    row of the language model's sequence. min_patches, max_patches: of an image.
    """

    patch: int
    pixel_shuffle: int
    min_patches: int
    max_patches: int

    def size_of(self, height: int, width: int) -> int:
        """Return the size, as data sources give it, of an image of these pixels."""
        return packed_size(0, *self.grid_of(height, width))

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the rows that images of these sizes become, int64 [images]."""
        return grids_of(sizes).prod(axis=1) // self.pixel_shuffle**2

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches to which an image of these pixels is resized.

        They are those of its own size, if they are from ``min_patches`` to ``max_patches``; else
        they shrink or grow alike. A multiple of the pixel shuffle's factor is taken of each.
        """
        least, most = self.min_patches, self.max_patches
        # Half a patch more, and round() takes the even one of two neighbours: as released.
        rows, columns = (round(pixels / self.patch + 0.5) for pixels in (height, width))
        scale = min(1.0, math.sqrt(most / (rows * columns)))
        rows, columns = (max(1, math.floor(scale * side)) for side in (rows, columns))
        if rows * columns < least < most:
            scale = math.sqrt(least / (rows * columns))
            rows, columns = math.ceil(scale * rows), math.ceil(scale * columns)
        rows = self._multiple(rows, columns)
        return rows, self._multiple(columns, rows)

    def _multiple(self, side: int, other: int) -> int:
        """Return the next multiple for one side of a grid, or the one before at ``max_patches``."""
        factor = self.pixel_shuffle
        if not side % factor:
            return side
        below = side // factor * factor
        fits = (below + factor) * other <= self.max_patches
        return below + factor if fits else max(factor, below)

    def cut(self, image: torch.Tensor) -> torch.Tensor:
        """Resize an image to its grid, in fp32, and cut it into patches.

        Args:
            image: uint8 [3, H, W].

        Returns:
            float32 [rows, columns, 3 · patch²]; pixels may be slightly below 0 or above 255.
        """
        rows, columns = self.grid_of(*image.shape[1:])
        (pixels,) = resized(image[None], (rows * self.patch, columns * self.patch))
        return rearrange(pixels, "c (h y) (w x) -> h w (c y x)", h=rows, w=columns)


@dataclass(frozen=True)
class ClipGrids:
    """Settings of clips.

    patch: height and width of a patch in pixels. pixel_shuffle: height and width in patches of a
    row of the language model's sequence. tubelet: frames of a tubelet. patches: of a frame, about.
    """

    patch: int
    pixel_shuffle: int
    tubelet: int
    patches: int

    def size_of(self, frames: int, height: int, width: int) -> int:
        """Return the size, as data sources give it, of a clip of these frames and pixels."""
        return packed_size(math.ceil(frames / self.tubelet), *self.grid_of(height, width))

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches to which a frame of these pixels is resized.

        They have the frame's aspect ratio, about, and are multiples of the pixel shuffle's factor.
        """
        factor, ratio = self.pixel_shuffle, width / height
        sides = [
            max(1, round(math.sqrt(self.patches / ratio))),
            max(1, round(math.sqrt(self.patches * ratio))),
        ]
        above = [-(-side // factor) * factor for side in sides]
        if math.prod(above) <= self.patches:
            return above[0], above[1]
        rows, columns = (max(factor, side // factor * factor) for side in sides)
        return rows, columns

    def cut(self, frames: torch.Tensor) -> torch.Tensor:
        """Resize frames to their grid, in fp32, and cut tubelets of them into patches.

        The last frame is repeated until the last tubelet is whole.

        Args:
            frames: uint8 [frames, 3, H, W].

        Returns:
            float32 [tubelets, rows, columns, tubelet · 3 · patch²], as `PatchGrids.cut`.
        """
        rows, columns = self.grid_of(*frames.shape[2:])
        pixels = resized(frames, (rows * self.patch, columns * self.patch))
        lacking = -len(frames) % self.tubelet
        pixels = torch.cat([pixels, pixels[-1:].expand(lacking, -1, -1, -1)])
        pattern = "(n t) c (h y) (w x) -> n h w (t c y x)"
        return rearrange(pixels, pattern, t=self.tubelet, h=rows, w=columns)
