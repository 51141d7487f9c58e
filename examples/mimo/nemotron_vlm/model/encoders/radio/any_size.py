# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""RADIO on whole images of any size, and on clips, as Nemotron 3 Nano Omni has it.

An image is resized to a *grid* of patches, rows and columns, near its own. A clip is tubelets of
some frames each, of one grid (media_sizes.py). The patches of all images, and then of all
tubelets, are one packed sequence, in which each image and each tubelet attends to itself alone. The
host knows every grid, so that nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange

from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.model.encoders.radio.tiles import RADIOEncoderWrapper, normalize
from examples.mimo.nemotron_vlm.model.media_sizes import (
    ClipGrids,
    PatchGrids,
    grids_of,
    tubelets_of,
)
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths, copied_to


class GroupedRADIO(RADIOViTModel):
    """Upstream's model on patches of images and of tubelets, grouped on the host.

    It takes the boundaries of sequences on the host. Upstream adds the class tokens to them, which
    on the device would wait for it; then they go to the device, once.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoder.register_forward_pre_hook(_bounds_to_device, with_kwargs=True)

    def _apply_temporal_grouping(self, x, imgs_sizes, num_frames, packed_seq_params, **_):
        """Take ``x`` as the pair of both, [1, patches, features] each; upstream groups frames on
        the device.
        """
        return x, imgs_sizes, num_frames, packed_seq_params, (True, False)


class PackedRADIOEncoder(RADIOEncoderWrapper):
    """`RADIOEncoderWrapper` on the packed patches of images and clips, which upstream embeds."""

    dynamic_resolution = True
    model = GroupedRADIO

    def forward(
        self,
        patches: torch.Tensor,
        tubelets: torch.Tensor,
        grids: np.ndarray,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encode images and clips; without any, encode a blank image, whose output the caller
        drops.

        Args:
            patches: [patches, 3 · patch²], pixels of about 0 … 255, row by row of each image. Only
                the first stage reads them.
            tubelets: the same of clips, [patches, tubelet · 3 · patch²].
            grids: int64 [inputs, 3], on the host: each input's tubelets, 0 of an image, and the
                rows and columns of its patches.
            hidden_states: [1, patches and class tokens, hidden], output of the stage before.

        Returns:
            [rows, output_size] in the order of the inputs, or hidden states for the next stage.
        """
        sizes, first = self.sizes, self.is_first_stage
        if not len(grids):
            grids = np.array([[0, sizes.pixel_shuffle, sizes.pixel_shuffle]])
            patches = patches.new_zeros(sizes.pixel_shuffle**2, patches.size(1))
        inputs = len(grids)
        if self.config.fp8:
            patches, grids = self._filled_up(patches, grids)
        counts = np.maximum(grids[:, 0], 1)
        is_clip, shapes = (grids[:, 0] > 0).repeat(counts), grids[:, 1:].repeat(counts, axis=0)
        images_first = np.argsort(is_clip, kind="stable")
        lengths = shapes[images_first].prod(axis=1)
        whole = lengths + sizes.class_tokens
        # RADIOViTModel adds its class tokens to the boundaries.
        packed = _packed(lengths if first else whole)
        PaddedLengths.note(packed, whole.tolist())
        if first:
            pixels = self._pixels(patches)
            given = {
                "imgs_sizes": (shapes[images_first] * sizes.patch).tolist(),
                "packed_seq_params": packed,
            }
            if sizes.tubelet > 1:
                both = pixels, self._pixels(tubelets)
                features, *_ = self.radio(both, num_frames=counts, **given)
            else:
                features = self.radio(pixels, **given)
        else:
            self.radio.decoder.set_input_tensor(hidden_states.transpose(0, 1).contiguous())
            features = self.radio.decoder(None, attention_mask=None, packed_seq_params=packed)
            features = features.transpose(0, 1)
        if not self.is_last_stage:
            return features.contiguous()
        order = shuffled(shapes, images_first, sizes, shown=counts[:inputs].sum())
        order = copied_to(features.device, order)
        return features[0].index_select(0, order).view(-1, sizes.output_size)

    def _filled_up(
        self, patches: torch.Tensor, grids: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Add a blank image of one row that fills up the tokens, as products in FP8 need."""
        each = grids[:, 1] * grids[:, 2] + self.sizes.class_tokens
        tokens = (np.maximum(grids[:, 0], 1) * each).sum() + self.sizes.class_tokens
        columns = 1 + -(tokens + 1) % get_fp8_align_size(self.config.fp8_recipe)
        blank = patches.new_zeros(columns, patches.size(1))
        return torch.cat([patches, blank]), np.append(grids, [[0, 1, columns]], axis=0)

    def _pixels(self, patches: torch.Tensor) -> torch.Tensor:
        """Return normalized patches [patches, frames · 3 · patch²] as [1, …]."""
        channels = patches.reshape(-1, 3, self.sizes.patch**2)
        pixels = normalize(channels, self.sizes).view(patches.shape)
        return pixels.to(self.config.params_dtype)[None]


def _bounds_to_device(decoder: torch.nn.Module, _, given: dict) -> None:
    """Copy the boundaries of sequences to the device before its layers read them."""
    packed, device = given["packed_seq_params"], next(decoder.parameters()).device
    packed.cu_seqlens_q = packed.cu_seqlens_kv = copied_to(device, packed.cu_seqlens_q)


def _packed(lengths: np.ndarray) -> PackedSeqParams:
    """Return the boundaries of sequences of these lengths, on the host."""
    bounds, longest = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)), int(lengths.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,  # otherwise Transformer Engine compares on the device
    )


def shuffled(shapes: np.ndarray, packed: np.ndarray, sizes: Radio, shown: int) -> torch.Tensor:
    """Return the order in which patches form rows, ``pixel_shuffle`` squared of them each.

    Args:
        shapes: int64 [images and tubelets, 2], rows and columns of each, in the order of the rows.
        packed: their order in the packed sequence, int64 [images and tubelets].
        shown: images and tubelets that have rows; the others come after them in ``shapes``.

    Returns:
        int64 [patches], indices into the packed sequence.
    """
    lengths, factor = shapes.prod(axis=1), sizes.pixel_shuffle
    starts = np.empty_like(lengths)
    starts[packed] = np.cumsum(lengths[packed] + sizes.class_tokens) - lengths[packed]
    orders = []
    for start, (rows, columns) in zip(starts[:shown], shapes[:shown], strict=True):
        order = np.arange(start, start + rows * columns).reshape(rows, columns)
        orders.append(rearrange(order, "(h a) (w b) -> (h w a b)", a=factor, b=factor))
    return torch.from_numpy(np.concatenate(orders))


@dataclass(frozen=True)
class RadioOfAnySize(Radio):
    """`Radio` on whole images and clips: the same parameters, names and sizes.

    The usual image is as large as a tile.
    """

    plural = "images"
    module = PackedRADIOEncoder

    @property
    def usual(self) -> int:
        return self.grids.size_of(self.tile, self.tile)

    @property
    def grids(self) -> PatchGrids:
        """The grids that images are resized to."""
        return PatchGrids(self.patch, self.pixel_shuffle, self.min_patches, self.max_patches)

    @property
    def clips(self) -> ClipGrids | None:
        """The grids that frames of clips are resized to; None if the model has no video."""
        if self.tubelet == 1:
            return None
        return ClipGrids(self.patch, self.pixel_shuffle, self.tubelet, self.clip_patches)

    def count_patches(self, sizes: np.ndarray) -> np.ndarray:
        """See `Radio`; a tubelet's count once, not for each of its frames."""
        return grids_of(sizes).prod(axis=1) * np.maximum(tubelets_of(sizes), 1)

    def sequences(self, sizes: np.ndarray) -> np.ndarray:
        """See `Radio`; a tubelet is an image."""
        return np.maximum(tubelets_of(sizes), 1)

    def features(self, sizes: np.ndarray) -> np.ndarray:
        """See `Radio`; a tubelet has those of all its frames."""
        return super().features(sizes) * np.where(tubelets_of(sizes), self.tubelet, 1)

    def collate(self, parts: Sequence[Sequence[torch.Tensor]]) -> dict[str, object]:
        """See `Encoder`; parts are images and clips as `PatchGrids` and `ClipGrids` cut them."""
        inputs = [each for part in parts for each in part]
        features = 3 * self.patch**2
        images = [each.flatten(0, -2) for each in inputs if each.ndim == 3]
        clips = [each.flatten(0, -2) for each in inputs if each.ndim == 4]
        grids = [(0, *each.shape[:-1])[-3:] for each in inputs]
        return {
            "patches": torch.cat([torch.empty(0, features), *images]),
            "tubelets": torch.cat([torch.empty(0, features * self.tubelet), *clips]),
            "grids": np.array(grids, dtype=np.int64).reshape(-1, 3),
        }
