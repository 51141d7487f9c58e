# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""RADIO ViT as a MIMO encoder: tiles in, language-model-sized tokens' features out."""

from __future__ import annotations

import torch
from einops import rearrange

from examples.mimo.nemotron_vlm.presets import EncoderPreset
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


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


def normalize(tiles: torch.Tensor, preset: EncoderPreset) -> torch.Tensor:
    """Pixels in 0 … 255 to [0, 1], minus the mean of a channel, over its deviation, in fp32.

    Args:
        tiles: [n, 3, H, W].
    """
    channels = zip(tiles.unbind(1), preset.pixel_mean, preset.pixel_std, strict=True)
    return torch.stack([(channel / 255 - mean) / std for channel, mean, std in channels], dim=1)


class RADIOEncoderWrapper(MegatronModule):
    """RADIO ViT without its class tokens, pixel-shuffled.

    The position embeddings are the deterministic ones (no random crops), so that the outcome does
    not depend on which rank encodes a tile.

    Args:
        config: of the ViT; sequence parallelism must be off.
        layer_spec: of its transformer layers.
        preset: image geometry.
        pg_collection: the encoder's process groups. Of a pipeline, the first stage embeds the
            patches, and the last one shuffles.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_spec: ModuleSpec,
        preset: EncoderPreset,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.preset = preset
        self.radio = RADIOViTModel(
            transformer_config=config,
            transformer_layer_spec=layer_spec,
            class_token_len=preset.class_tokens,
            patch_dim=preset.patch,
            img_h=preset.tile,
            img_w=preset.tile,
            max_img_h=preset.max_tile,
            max_img_w=preset.max_tile,
            force_cpe_eval_mode=True,
            pg_collection=pg_collection,
        )
        stage, stages = pg_collection.pp.rank(), pg_collection.pp.size()
        self.is_first_stage, self.is_last_stage = stage == 0, stage == stages - 1
        if not self.is_first_stage:
            del self.radio.embedder, self.radio.class_token, self.radio.position_embeddings
            self.radio.decoder.pre_process = False

    def forward(
        self, tiles: torch.Tensor, hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode tiles.

        Without any, a blank one is encoded and dropped, so that every parameter gets a gradient of
        zero and this rank takes part in what its peers do in the backward.

        Args:
            tiles: [n, 3, H, W], pixels in 0 … 255; n may be 0. Later stages read only n.
            hidden_states: [n or 1, patches and class tokens, hidden], of the stage before.

        Returns:
            [n · tokens_per_tile, output_size], or hidden states for the next stage.
        """
        if self.is_first_stage:
            encoded = tiles if len(tiles) else tiles.new_zeros(1, *tiles.shape[1:])
            pixels = normalize(encoded, self.preset)
            features = self.radio(pixels.to(self.config.params_dtype))
        else:
            self.radio.decoder.set_input_tensor(hidden_states.transpose(0, 1).contiguous())
            features = self.radio.decoder(None, attention_mask=None).transpose(0, 1)
        if not self.is_last_stage:
            return features.contiguous()
        patches = features[: len(tiles), self.preset.class_tokens :]
        rows = self.preset.tile // self.preset.patch
        return pixel_shuffle(patches, rows, self.preset.pixel_shuffle).flatten(0, 1)
