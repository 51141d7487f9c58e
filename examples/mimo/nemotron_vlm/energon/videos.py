# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Clips of video: numbered images, or an MP4 file, as frames; and what names them in a text."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.energon.errors import BadMedium, MissingPackage
from examples.mimo.nemotron_vlm.energon.images import LONGEST, open_image
from examples.mimo.nemotron_vlm.model.media_sizes import ClipGrids

MP4 = b"ftyp"
"""Bytes 4 to 7 of an MP4 file."""

STILLS = b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"
"""Bytes 8 to 11 of images that begin like an MP4 file."""


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

    def frames_of(self, files: Sequence[bytes], fps: float) -> tuple[Extent, list[np.ndarray]]:
        """Return the extent of a clip, and the frames that are taken, upright: uint8 [H, W, 3].

        Args:
            files: its frames as JPEG or PNG, or one MP4 file.
            fps: frames of images in a second; 0 if not known.

        Raises:
            BadMedium: a frame is damaged, or frames in a second are asked for and not known.
            MissingPackage: it is MP4, and PyAV is not installed.
            Exception: PyAV finds it damaged.
        """
        if files[0][4:8] == MP4 and files[0][8:12] not in STILLS:
            try:
                import av
            except ModuleNotFoundError as error:
                raise MissingPackage("MP4 needs PyAV: pip install '.[mp4]'") from error
            with av.open(io.BytesIO(files[0])) as container:
                if not container.streams.video:
                    raise BadMedium("an MP4 file without video")
                stream = container.streams.video[0]
                count = _count(container, stream, _is_whole(files[0]))
                fps = float(stream.average_rate or 0)
                chosen = self._taken(count, fps)
                wanted, numbered = set(chosen), enumerate(container.decode(stream))
                frames = [_upright(frame) for number, frame in numbered if number in wanted]
        else:
            count, chosen = len(files), self._taken(len(files), fps)
            frames = [_frame(files, number) for number in chosen]
        shapes = {frame.shape for frame in frames}
        if len(frames) != len(chosen) or len(shapes) != 1:
            raise BadMedium(f"{len(frames)} of {len(chosen)} frames, of {len(shapes)} sizes")
        height, width, _ = frames[0].shape
        if max(self.grids.grid_of(height, width)) > LONGEST:
            raise BadMedium(f"{width} × {height} pixels are too long a strip")
        return Extent(self.grids.size_of(len(chosen), height, width), count, fps), frames

    def cut(self, frames: list[np.ndarray]) -> torch.Tensor:
        """Return the tubelets of a clip, as `ClipGrids.cut` does."""
        return self.grids.cut(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2))

    def _taken(self, count: int, fps: float) -> list[int]:
        """Return the numbers of the frames taken of ``count``; raise BadMedium if unfit."""
        if self.fps and not self.frames and not fps:
            raise BadMedium('needs "fps" in its json, as frames in a second are asked for')
        chosen = self.chosen(count, fps).tolist() if count else []
        if not 0 < len(chosen) <= LONGEST * self.grids.tubelet:
            raise BadMedium(f"{len(chosen)} frames: from 1 to {LONGEST * self.grids.tubelet} fit")
        return chosen

    def labels(self, extent: Extent) -> list[str]:
        """Return what the released processor writes before each tubelet of a clip."""
        duration = int(1000 / extent.fps) if extent.fps else 0
        frames = [
            f"rame {number}"
            + (f" sampled at {index * duration / 1000:.2f} seconds" if extent.fps else "")
            for number, index in enumerate(self.chosen(extent.frames, extent.fps).tolist(), 1)
        ]
        starts = range(0, len(frames), self.grids.tubelet)
        groups = (frames[start : start + self.grids.tubelet] for start in starts)
        return [f"F{' and f'.join(group)}: " for group in groups]

    def chosen(self, total: int, fps: float) -> np.ndarray:
        """Return the numbers of the frames taken of ``total``, evenly spaced; int64 [frames]."""
        count = self.frames
        if count is None:
            count = total if self.fps is None else max(1, int(total / fps * self.fps))
        count = min(count, total)
        return np.arange(count, dtype=np.int64) * total // count


def _frame(files: Sequence[bytes], number: int) -> np.ndarray:
    try:
        return np.array(open_image(files[number])[0])
    except Exception as error:  # Pillow raises errors of all kinds for damaged files
        raise BadMedium(f"frame {number + 1}: {one_line(error)}") from error


def _upright(frame: Any) -> np.ndarray:
    """Return a frame's pixels, turned by quarters as its display matrix says, like torchcodec."""
    degrees = frame.rotation if abs(frame.rotation) <= 180 else 0  # a matrix of zeros has none
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(degrees / 90)))


def _count(container: Any, stream: Any, is_whole: bool) -> int:
    """Return the number of frames of a stream that are shown, if none is missing.

    A header may count the frames of the first fragment alone, or also frames that an edit list
    leaves out. From a key frame to the place of a cut, an edit list hides frames, which are not
    decoded.

    Args:
        is_whole: whether the file has all its data; if not, the header counts the missing frames.
    """
    hidden = [packet.is_discard for packet in container.demux(stream) if packet.size]
    container.seek(0)
    return max(0 if is_whole else stream.frames, len(hidden)) - sum(hidden)


def _is_whole(data: bytes) -> bool:
    """Return whether an MP4 file has its media data (``mdat``) to the end."""
    start, kind = 0, b""
    while start + 8 <= len(data):
        size, kind = int.from_bytes(data[start : start + 4]), data[start + 4 : start + 8]
        if size == 1:
            size = int.from_bytes(data[start + 8 : start + 16])
        start += size or len(data) - start
    return start <= len(data) or kind != b"mdat"
