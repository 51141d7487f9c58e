# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Clips of a video as tubelets of patches, as Nemotron 3 Nano Omni's processor makes them.

A *tubelet* is some frames in a row, two as released, which are embedded together and attend to
themselves alone.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange

from examples.mimo.nemotron_vlm.model.patch_grids import packed_size, resized


def sampled_frames(
    total: int, fps: float | None = None, wanted: int | None = None, wanted_fps: float | None = None
) -> np.ndarray:
    """Return the numbers of the frames that a clip has of a video's, evenly spaced; int64 [frames].

    Args:
        total: frames of the video.
        fps: its frames in a second.
        wanted: frames of the clip, or all of a shorter video; by default so many that there are
            ``wanted_fps`` in a second, or without this, all.
    """
    if wanted is None:
        wanted = total if wanted_fps is None else max(1, int(total / fps * wanted_fps))
    wanted = min(wanted, total)
    return np.arange(wanted, dtype=np.int64) * total // wanted


@dataclass(frozen=True)
class ClipGrids:
    """Settings of clips.

    patch: height and width of a patch in pixels. pixel_shuffle: so many patches high and wide is a
    row of the language model's sequence. tubelet: frames of a tubelet. patches: of a frame, about.
    """

    patch: int
    pixel_shuffle: int
    tubelet: int
    patches: int

    def size_of(self, frames: int, height: int, width: int) -> int:
        """Return the size, as data sources give it, of a clip of so many frames of so many
        pixels.
        """
        return packed_size(math.ceil(frames / self.tubelet), *self.grid_of(height, width))

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches that a frame of so many pixels is resized to.

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
