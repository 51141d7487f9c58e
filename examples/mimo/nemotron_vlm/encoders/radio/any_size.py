# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""RADIO on whole images of any size: dynamic resolution, as Nemotron 3 Nano Omni has it.

An image is resized to a *grid* of patches, rows and columns, near its own. The patches of all
images are one packed sequence, in which each image attends to itself alone. The host knows every
grid, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange

from examples.mimo.nemotron_vlm.data.patch_grids import PatchGrids, grids_of
from examples.mimo.nemotron_vlm.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.encoders.radio.tiles import RADIOEncoderWrapper, normalize
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths
from megatron.core.token_layout.device_copy import copied_to


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
    takes_fp8 = False  # its products need multiples of sixteen tokens

    @property
    def usual(self) -> int:
        return self.grids.size_of(self.tile, self.tile)

    @property
    def grids(self) -> PatchGrids:
        """The grids that images are resized to."""
        return PatchGrids(self.patch, self.pixel_shuffle, self.min_patches, self.max_patches)

    def count_patches(self, sizes: np.ndarray) -> np.ndarray:
        return grids_of(sizes).prod(axis=1)

    def collate(self, parts: Sequence[Sequence[torch.Tensor]]) -> dict[str, object]:
        """See `Encoder`; parts are images as `PatchGrids.cut` returns them."""
        images = [image for part in parts for image in part]
        none = torch.empty(0, 3 * self.patch**2)
        grids = np.array([image.shape[:2] for image in images], dtype=np.int64).reshape(-1, 2)
        return {
            "patches": torch.cat([none, *(each.flatten(0, 1) for each in images)]),
            "grids": grids,
        }
