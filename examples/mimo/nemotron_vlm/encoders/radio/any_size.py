# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""RADIO on whole images of any size: dynamic resolution, as Nemotron 3 Nano Omni has it.

An image is resized to a *grid* of patches, rows and columns, near its own. The patches of all
images are one packed sequence, in which each image attends to itself alone. The host knows every
grid, so that nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange

from examples.mimo.nemotron_vlm.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.encoders.radio.tiles import RADIOEncoderWrapper, normalize
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths
from megatron.core.token_layout.device_copy import copied_to

COLUMN_BITS = 16
"""Bits of an image's size that hold its grid's columns; its rows are above them."""


def grids_of(sizes: np.ndarray) -> np.ndarray:
    """Return the grids, int64 [images, 2], of sizes as `RadioOfAnySize.size_of` gives them."""
    return np.stack([sizes >> COLUMN_BITS, sizes & (1 << COLUMN_BITS) - 1], axis=1)


class PackedRADIOEncoder(RADIOEncoderWrapper):
    """`RADIOEncoderWrapper` on the packed patches of images, which upstream embeds."""

    dynamic_resolution = True

    def forward(
        self, patches: torch.Tensor, grids: np.ndarray, hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode images; without any, encode a blank one, whose output the caller drops.

        Args:
            patches: [patches, 3 · patch²], pixels of about 0 … 255, row by row of each image. Only
                the first stage reads them.
            grids: int64 [images, 2], on the host: rows and columns of each image's patches.
            hidden_states: [1, patches and class tokens, hidden], output of the stage before.

        Returns:
            [rows, output_size], or hidden states for the next stage.
        """
        sizes, first = self.sizes, self.is_first_stage
        if not len(grids):
            grids = np.full((1, 2), sizes.pixel_shuffle)
            patches = patches.new_zeros(sizes.pixel_shuffle**2, patches.size(1))
        lengths = grids.prod(axis=1)
        whole = lengths + sizes.class_tokens
        # RADIOViTModel adds its class tokens to the boundaries.
        packed = _packed(lengths if first else whole, patches.device)
        PaddedLengths.note(packed, whole.tolist())
        if first:
            pixels = normalize(patches.unflatten(1, (3, -1)), sizes).flatten(1)
            pixels = pixels.to(self.config.params_dtype)[None]
            shapes = (grids * sizes.patch).tolist()
            features = self.radio(pixels, imgs_sizes=shapes, packed_seq_params=packed)
        else:
            self.radio.decoder.set_input_tensor(hidden_states.transpose(0, 1).contiguous())
            features = self.radio.decoder(None, attention_mask=None, packed_seq_params=packed)
            features = features.transpose(0, 1)
        if not self.is_last_stage:
            return features.contiguous()
        order = copied_to(features.device, shuffled(grids, sizes.class_tokens, sizes.pixel_shuffle))
        return features[0].index_select(0, order).view(-1, sizes.output_size)


def _packed(lengths: np.ndarray, device: torch.device) -> PackedSeqParams:
    """Return the boundaries of sequences of these lengths, for attention."""
    bounds = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
    bounds, longest = copied_to(device, bounds), int(lengths.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,  # otherwise Transformer Engine compares on the device
    )


def shuffled(grids: np.ndarray, class_tokens: int, factor: int) -> torch.Tensor:
    """Return the order in which patches form rows, each of ``factor`` × ``factor`` of them.

    Args:
        grids: int64 [images, 2].
        class_tokens: tokens before the patches of each image.

    Returns:
        int64 [patches], indices into the sequence of all images.
    """
    orders, start = [], 0
    for rows, columns in grids.tolist():
        start += class_tokens
        order = np.arange(start, start + rows * columns).reshape(rows, columns)
        squares = rearrange(order, "(h a) (w b) -> (h w a b)", a=factor, b=factor)
        orders.append(squares)
        start += rows * columns
    return torch.from_numpy(np.concatenate(orders))


@dataclass(frozen=True)
class RadioOfAnySize(Radio):
    """`Radio` on whole images: the same parameters, names and sizes.

    The usual image is as large as a tile.
    """

    module = PackedRADIOEncoder

    @property
    def usual(self) -> int:
        return self.size_of(self.tile, self.tile)

    def size_of(self, height: int, width: int) -> int:
        """Return the size, as data sources give it, of an image of so many pixels."""
        rows, columns = self.grid_of(height, width)
        return rows << COLUMN_BITS | columns

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches that an image of so many pixels is resized to.

        They are those of its own size, if they are from ``min_patches`` to ``max_patches``; else
        they shrink or grow alike. A multiple of the pixel shuffle's factor is taken of each.
        """
        least, most = self.min_patches, self.max_patches
        # Half a patch more, and round() takes the even one of two neighbours: as released.
        rows, columns = round(height / self.patch + 0.5), round(width / self.patch + 0.5)
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
        shape, pixels = (rows * self.patch, columns * self.patch), image.float()
        if image.shape[1:] != shape:
            smooth = {"mode": "bicubic", "antialias": True, "align_corners": False}
            pixels = F.interpolate(pixels[None], shape, **smooth)[0]
        return rearrange(pixels, "c (h y) (w x) -> h w (c y x)", h=rows, w=columns)

    def count_patches(self, sizes: np.ndarray) -> np.ndarray:
        return grids_of(sizes).prod(axis=1)

    def collate(self, parts: Sequence[Sequence[torch.Tensor]]) -> dict[str, object]:
        """See `Encoder`; parts are images as `cut` returns them."""
        images = [image for part in parts for image in part]
        none = torch.empty(0, 3 * self.patch**2)
        grids = np.array([image.shape[:2] for image in images], dtype=np.int64).reshape(-1, 2)
        return {
            "patches": torch.cat([none, *(each.flatten(0, 1) for each in images)]),
            "grids": grids,
        }
