# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Encoding of a conversation and its images as tokens and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.text import Text
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


@dataclass(frozen=True)
class Encoder:
    """Encodes samples as tokens and tiles; nothing in it depends on the sequence length.

    tokens_per_tile: image tokens of a tile. ``tiling`` applies to each image of a sample on its
    own. prompt: question for samples that have only a caption.
    """

    chat: Chat
    tiling: Tiling
    tokens_per_tile: int
    prompt: str = DEFAULT_PROMPT

    @property
    def settings(self) -> dict[str, object]:
        """Everything that determines tokens and tiles, except the data."""
        return {
            "chat": self.chat.fingerprint,
            "tile": self.tiling.tile,
            "max_tiles": self.tiling.max_tiles,
            "thumbnail": self.tiling.thumbnail,
            "tokens_per_tile": self.tokens_per_tile,
            "prompt": self.prompt,
        }

    def record(self, sample: Any) -> Record:
        """Return the conversation of one of energon's samples; raises what `read_record` raises."""
        return read_record(sample, self.prompt)

    def tiles_of_images(self, record: Record) -> list[int]:
        """Return the number of tiles of each image; only the images' headers are read.

        Raises:
            BadImage: the header of an image cannot be read.
        """
        counts = []
        for number, data in enumerate(record.images):
            with _naming(number, record):
                counts.append(self.tiling.count(*open_image(data).size))
        return counts

    def text(self, record: Record, counts: list[int]) -> Text:
        """Return the tokens of a record, without reading its images.

        Args:
            counts: number of tiles of each image.

        Raises:
            BadConversation: the conversation cannot be tokenized, or no token bears a loss.
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
        """Return the tiles of all images, uint8 [n, 3, tile, tile]; n is 0 without images.

        Raises:
            BadImage: an image cannot be decoded.
        """
        size = self.tiling.tile
        cut = [torch.empty(0, 3, size, size, dtype=torch.uint8)]
        for number, data in enumerate(record.images):
            with _naming(number, record):
                cut.append(self.tiling.cut(open_image(data)))
        return torch.cat(cut)


@contextmanager
def _naming(number: int, record: Record) -> Iterator[None]:
    """Name the bad image in the error, if the record has several images."""
    try:
        yield
    except BadImage as error:
        if len(record.images) == 1:
            raise
        raise BadImage(f"image {number + 1}: {error}") from error
