# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Encoding of a conversation and its images as tokens and tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from examples.mimo.nemotron_vlm.data.sample import Text
from examples.mimo.nemotron_vlm.energon.conversation import Chat, place_images
from examples.mimo.nemotron_vlm.energon.errors import BadConversation, BadImage
from examples.mimo.nemotron_vlm.energon.records import DEFAULT_PROMPT, Record
from examples.mimo.nemotron_vlm.energon.tiling import Tiling, open_image


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
            **asdict(self.tiling),
            "tokens_per_tile": self.tokens_per_tile,
            "prompt": self.prompt,
        }

    def text(self, record: Record, counts: list[int]) -> Text:
        """Return the tokens of a record.

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

    def tiles_of_images(self, images: list[bytes]) -> list[int]:
        """Return the number of tiles of each image; only the images' headers are read.

        Raises:
            BadImage: the header of an image cannot be read.
        """
        return _each(images, lambda image: self.tiling.count(*image.size))

    def tiles(self, images: list[bytes]) -> torch.Tensor:
        """Return the tiles of all images, uint8 [n, 3, tile, tile]; n is 0 without images.

        Raises:
            BadImage: an image cannot be decoded.
        """
        none = torch.empty(0, 3, self.tiling.tile, self.tiling.tile, dtype=torch.uint8)
        return torch.cat([none, *_each(images, self.tiling.cut)])


def _each(images: list[bytes], read: Callable[[Image.Image], Any]) -> list[Any]:
    results = []
    for number, data in enumerate(images, 1):
        try:
            results.append(read(open_image(data)))
        except BadImage as error:
            raise BadImage(f"image {number}: {error}") from error
    return results
