# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""RADIO ViT and pixel shuffle on square tiles of one size."""

from __future__ import annotations

from math import ceil, gcd
from typing import TYPE_CHECKING

import torch
from einops import rearrange

from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio


def pixel_shuffle(features: torch.Tensor, rows: int, factor: int) -> torch.Tensor:
    """Fold each ``factor`` × ``factor`` square of patches into the features of one token.

    Args:
        features: [n, rows · columns, C], row by row.

    Returns:
        [n, rows · columns / factor², C · factor²]
    """
    return rearrange(
        features, "n (h a w b) c -> n (h w) (a b c)", h=rows // factor, a=factor, b=factor
    )


def normalize(tiles: torch.Tensor, sizes: Radio) -> torch.Tensor:
    """Scale pixels from 0 … 255 to [0, 1], subtract each channel's mean, and divide by its std;
    fp32.

    Args:
        tiles: [n, 3, H, W].
    """
    channels = zip(tiles.unbind(1), sizes.pixel_mean, sizes.pixel_std, strict=True)
    return torch.stack([(channel / 255 - mean) / std for channel, mean, std in channels], dim=1)


class RADIOEncoderWrapper(MegatronModule):
    """RADIO ViT whose output has no class tokens and is pixel-shuffled.

    The position embeddings are deterministic, so the output is the same on whichever rank.
    ``dynamic_resolution`` is RADIOViTModel's argument. An embedder of video is kept as it is.

    Args:
        config: configuration of the ViT; sequence parallelism must be off.
        pg_collection: the encoder's process groups. In a pipeline, the first stage embeds the
            patches, and the last one applies the pixel shuffle.
    """

    dynamic_resolution = False
    model = RADIOViTModel

    def __init__(
        self,
        config: TransformerConfig,
        layer_spec: ModuleSpec,
        sizes: Radio,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.sizes = sizes
        self.radio = self.model(
            transformer_config=config,
            transformer_layer_spec=layer_spec,
            class_token_len=sizes.class_tokens,
            patch_dim=sizes.patch,
            img_h=sizes.tile,
            img_w=sizes.tile,
            max_img_h=sizes.max_tile,
            max_img_w=sizes.max_tile,
            dynamic_resolution=self.dynamic_resolution,
            force_cpe_eval_mode=True,
            temporal_patch_dim=sizes.tubelet,
            separate_video_embedder=True,
            pg_collection=pg_collection,
        )
        pp = pg_collection.pp
        self.is_first_stage, self.is_last_stage = is_pp_first_stage(pp), is_pp_last_stage(pp)
        if not self.is_first_stage:
            del self.radio.embedder, self.radio.class_token, self.radio.position_embeddings
            if sizes.tubelet > 1:
                del self.radio.video_embedder
            self.radio.decoder.pre_process = False
        elif sizes.tubelet > 1 and not self.dynamic_resolution:
            self.radio.temporal_patch_dim = 1
            self.radio.video_embedder.requires_grad_(False)

    def forward(
        self, tiles: torch.Tensor, hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode tiles; without any, encode blank ones, whose output the caller drops.

        Args:
            tiles: [n, 3, H, W], pixels in 0 … 255; n may be 0. Only the first stage reads them.
            hidden_states: [n + blank tiles, patches and class tokens, hidden], output of the stage
                before.

        Returns:
            [(n or 1) · tokens_per_tile, output_size], or hidden states for the next stage.
        """
        if self.is_first_stage:
            blank = tiles.new_zeros(self._blank_tiles(len(tiles)), *tiles.shape[1:])
            encoded = torch.cat([tiles, blank]) if len(blank) else tiles
            pixels = normalize(encoded, self.sizes)
            features = self.radio(pixels.to(self.config.params_dtype))
        else:
            self.radio.decoder.set_input_tensor(hidden_states.transpose(0, 1).contiguous())
            features = self.radio.decoder(None, attention_mask=None).transpose(0, 1)
        if not self.is_last_stage:
            return features.contiguous()
        patches = features[: max(len(tiles), 1), self.sizes.class_tokens :]
        rows = self.sizes.tile // self.sizes.patch
        return pixel_shuffle(patches, rows, self.sizes.pixel_shuffle).flatten(0, 1)

    def _blank_tiles(self, tiles: int) -> int:
        """Return the blank tiles encoded after so many: one without any, in FP8 as many as make the
        tokens a multiple that its matrix products take."""
        tokens, of_tokens = self.sizes.patches + self.sizes.class_tokens, 1
        if self.config.fp8:
            of_tokens = get_fp8_align_size(self.config.fp8_recipe)
        multiple = of_tokens // gcd(of_tokens, tokens)
        return ceil(max(tiles, 1) / multiple) * multiple - tiles
