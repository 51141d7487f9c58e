# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One conversation with its images as tokens and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from examples.mimo.nemotron_vlm.energon.conversation import (
    BadConversation,
    Chat,
    place_images,
)
from examples.mimo.nemotron_vlm.energon.records import (
    DEFAULT_PROMPT,
    Record,
    read_record,
)
from examples.mimo.nemotron_vlm.energon.tiling import BadImage, Tiling, open_image
from examples.mimo.nemotron_vlm.text import Text


@dataclass(frozen=True)
class Encoder:
    """What makes tokens and tiles of a sample; nothing in it depends on the sequence length.

    tokens_per_tile: image tokens of a tile. max_tiles and thumbnail of ``tiling`` are for each
    image, however many a sample has. prompt: asks for a caption, where the sample does not.
    """

    chat: Chat
    tiling: Tiling
    tokens_per_tile: int
    prompt: str = DEFAULT_PROMPT

    @property
    def settings(self) -> dict[str, object]:
        """All that tokens and tiles depend on, but for the data."""
        return {
            "chat": self.chat.fingerprint,
            "tile": self.tiling.tile,
            "max_tiles": self.tiling.max_tiles,
            "thumbnail": self.tiling.thumbnail,
            "tokens_per_tile": self.tokens_per_tile,
            "prompt": self.prompt,
        }

    def record(self, sample: Any) -> Record:
        """The conversation of one of energon's samples; raises as `read_record`."""
        return read_record(sample, self.prompt)

    def tiles_of_images(self, record: Record) -> list[int]:
        """Tiles of each image, of which only the header is read.

        Raises:
            BadImage: one has no header.
        """
        counts = []
        for number, data in enumerate(record.images):
            with _naming(number, record):
                counts.append(self.tiling.count(*open_image(data).size))
        return counts

    def text(self, record: Record, counts: list[int]) -> Text:
        """Tokens; the images themselves are not looked at.

        Args:
            counts: tiles of each image.

        Raises:
            BadConversation: it cannot be written.
        """
        if len(record.images) != len(counts):
            raise BadConversation(f"{len(record.images)} images in the place of {len(counts)}")
        ids, answer = self.chat.encode(place_images(record.turns, len(counts)))
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == self.chat.image_token] = np.array(counts, np.int64) * self.tokens_per_tile
        ids, answer = np.repeat(ids, repeats), np.repeat(answer, repeats)
        if not answer[1:].any():
            raise BadConversation("no token bears a loss")
        ids = torch.from_numpy(ids)
        return Text(ids[:-1], ids[1:], torch.from_numpy(answer[1:].astype(np.float32)))

    def tiles(self, record: Record) -> torch.Tensor:
        """Tiles of all images: uint8 [n, 3, tile, tile], n = 0 without images.

        Raises:
            BadImage: one cannot be decoded.
        """
        size = self.tiling.tile
        cut = [torch.empty(0, 3, size, size, dtype=torch.uint8)]
        for number, data in enumerate(record.images):
            with _naming(number, record):
                cut.append(self.tiling.cut(open_image(data)))
        return torch.cat(cut)


@contextmanager
def _naming(number: int, record: Record) -> Iterator[None]:
    """Say which image it was, where there are several."""
    try:
        yield
    except BadImage as error:
        if len(record.images) == 1:
            raise
        raise BadImage(f"image {number + 1}: {error}") from error
