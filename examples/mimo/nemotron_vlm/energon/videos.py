# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Clips of video: numbered images, or an MP4 file, as frames; and what names them in a text."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.clip_grids import ClipGrids, sampled_frames
from examples.mimo.nemotron_vlm.energon.errors import (
    BadClip,
    BadImage,
    BadMedium,
    MissingPackage,
    one_line,
)
from examples.mimo.nemotron_vlm.energon.images import LONGEST, decoded, open_image

MP4 = b"ftyp"
"""Bytes 4 to 7 of an MP4 file."""


class Extent(NamedTuple):
    """The facts of an image, a sound or a clip that its text follows from.

    size: as the encoder's entry takes it. frames, fps: those of a clip's file in all and in a
    second; 0 if not known.
    """

    size: int
    frames: int = 0
    fps: float = 0.0


@dataclass(frozen=True)
class Watching:
    """Settings of how clips are read.

    grids: those that frames are resized to. frames: frames of a clip, or all of a shorter one. fps:
    without ``frames``, so many in a second. Without both, all are taken.
    """

    grids: ClipGrids
    frames: int | None = None
    fps: float | None = None

    def read(self, files: Sequence[bytes], fps: float) -> tuple[Extent, torch.Tensor]:
        """Return the extent of a clip, and its tubelets as `ClipGrids.cut` returns them.

        Args:
            files: its frames as JPEG or PNG, or one MP4 file.
            fps: frames of images in a second; 0 if not known.

        Raises:
            BadMedium: a frame is damaged, or frames in a second are asked for and not known.
            MissingPackage: it is MP4, and PyAV is not installed.
        """
        extent, frames = self.frames_of(files, fps)
        return extent, self.grids.cut(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2))

    def frames_of(self, files: Sequence[bytes], fps: float) -> tuple[Extent, list[np.ndarray]]:
        """Return the extent of a clip, and the frames that are taken, uint8 [H, W, 3] each."""
        if files[0][4:8] == MP4:
            with _opened(files[0]) as (container, stream):
                rate, size = float(stream.average_rate or 0), (stream.width, stream.height)
                extent, chosen = self._extent(_count(container, stream), rate, size)
                wanted, numbered = set(chosen), enumerate(container.decode(stream))
                frames = [f.to_ndarray(format="rgb24") for n, f in numbered if n in wanted]
        else:
            first = _frame(files, 0)  # which is always taken
            extent, chosen = self._extent(len(files), fps, first.shape[1::-1])
            frames = [first, *(_frame(files, number) for number in chosen[1:])]
        shapes = {frame.shape for frame in frames}
        if len(frames) != len(chosen) or len(shapes) != 1:
            raise BadClip(f"{len(frames)} of {len(chosen)} frames, of {len(shapes)} sizes")
        return extent, frames

    def _extent(self, count: int, fps: float, size: tuple[int, int]) -> tuple[Extent, list[int]]:
        """Return the extent of a clip by its frames, those of a second, and their width and height;
        and the numbers of the frames that are taken.
        """
        if self.fps and not self.frames and not fps:
            raise BadClip('needs "fps" in its json, as frames in a second are asked for')
        chosen, (width, height) = self._chosen(count, fps).tolist(), size
        if not chosen:
            raise BadClip("has no frames")
        if max(-(-len(chosen) // self.grids.tubelet), *self.grids.grid_of(height, width)) > LONGEST:
            raise BadClip(f"{len(chosen)} frames of {width} × {height} pixels are too many or long")
        return Extent(self.grids.size_of(len(chosen), height, width), count, fps), chosen

    def labels(self, extent: Extent) -> list[str]:
        """Return what the released processor writes before each tubelet of a clip."""
        duration = int(1000 / extent.fps) if extent.fps else 0
        frames = [
            f"rame {number}"
            + (f" sampled at {index * duration / 1000:.2f} seconds" if extent.fps else "")
            for number, index in enumerate(self._chosen(*extent[1:]).tolist(), 1)
        ]
        starts = range(0, len(frames), self.grids.tubelet)
        groups = (frames[start : start + self.grids.tubelet] for start in starts)
        return [f"F{' and f'.join(group)}: " for group in groups]

    def _chosen(self, total: int, fps: float) -> np.ndarray:
        """Return the numbers of the frames that are taken."""
        return sampled_frames(total, fps or None, self.frames, self.fps)


def _frame(files: Sequence[bytes], number: int) -> np.ndarray:
    try:
        return np.array(decoded(open_image(files[number])))
    except BadImage as error:
        raise BadClip(f"frame {number + 1}: {error}") from error


def _count(container: Any, stream: Any) -> int:
    """Return the number of frames of a stream; count them if its header does not say."""
    if stream.frames:
        return stream.frames
    count = sum(packet.size > 0 for packet in container.demux(stream))
    container.seek(0)
    return count


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Open an MP4 file; yields PyAV's container, and the stream of video."""
    try:
        import av
    except ModuleNotFoundError as error:
        raise MissingPackage("MP4 needs PyAV: pip install '.[mp4]'") from error
    try:
        with av.open(io.BytesIO(data)) as container:
            yield container, container.streams.video[0]
    except BadMedium:
        raise
    except Exception as error:  # of all kinds, for damaged files
        raise BadClip(one_line(error)) from error
