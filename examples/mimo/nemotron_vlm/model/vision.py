# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The vision module: RADIO ViT and projector, as stages of their own pipeline.

Megatron's modality submodules run their encoders on the first stage only. Here every stage runs
its layers: the first on tiles, the others on the hidden states of the stage before.
"""

from __future__ import annotations

import torch
from einops import rearrange

from examples.mimo.nemotron_vlm.model.presets import EncoderPreset
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor


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
    """Scale pixels from 0 … 255 to [0, 1], subtract each channel's mean, and divide by its std;
    fp32.

    Args:
        tiles: [n, 3, H, W].
    """
    channels = zip(tiles.unbind(1), preset.pixel_mean, preset.pixel_std, strict=True)
    return torch.stack([(channel / 255 - mean) / std for channel, mean, std in channels], dim=1)


class RADIOEncoderWrapper(MegatronModule):
    """RADIO ViT whose output has no class tokens and is pixel-shuffled.

    The position embeddings are deterministic (no random crops), so that the output does not depend
    on which rank encodes a tile.

    Args:
        config: configuration of the ViT; sequence parallelism must be off.
        layer_spec: spec of its transformer layers.
        preset: image geometry.
        pg_collection: the encoder's process groups. In a pipeline, the first stage embeds the
            patches, and the last one applies the pixel shuffle.
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
        """Encode tiles; without any, encode a blank one.

        Without any tile, there is an output of one, for the caller to drop.

        Args:
            tiles: [n, 3, H, W], pixels in 0 … 255; n may be 0. Only the first stage reads them.
            hidden_states: [n or 1, patches and class tokens, hidden], output of the stage before.

        Returns:
            [(n or 1) · tokens_per_tile, output_size], or hidden states for the next stage.
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
        patches = features[:, self.preset.class_tokens :]
        rows = self.preset.tile // self.preset.patch
        return pixel_shuffle(patches, rows, self.preset.pixel_shuffle).flatten(0, 1)


class NormedProjector(MegatronModule):
    """RMSNorm and a squared-ReLU MLP, from encoder features [n, input_size] to [n, H].

    Args:
        config: configuration of the MLP; ``hidden_size`` is the language model's.
        norm: norm class, built over the input features.
        submodules: the MLP's linear layers.
        input_size: features of one token.
        pg_collection: the encoder's process groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        norm: type,
        submodules: MLPSubmodules,
        input_size: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.norm = norm(config=config, hidden_size=input_size, eps=config.layernorm_epsilon)
        self.mlp = MultimodalProjector(
            config, submodules, "mlp", input_size, pg_collection=pg_collection
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map [n, input_size] to [n, H]."""
        return self.mlp(self.norm(features))


class VisionStage(VisionModalitySubmodules):
    """A pipeline stage of one encoder, with the projector on the last stage."""

    share_embeddings_and_output_weights = False
    """Megatron's gradient finalization reads it on a pipeline's first and last stage."""

    runs_on_every_rank = True
    """Without tiles, the stage encodes a blank one and drops its rows. So every parameter gets a
    gradient of zero, this rank takes part in its peers' collectives in the backward, and gradient
    reductions overlap the backward."""

    @property
    def pre_process(self) -> bool:
        """Whether this stage takes tiles."""
        return self.is_first_stage

    def forward(
        self,
        encoder_inputs: dict[str, dict[str, torch.Tensor]] | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the stage.

        Args:
            encoder_inputs: inputs of the encoder by name, on every stage.
            hidden_states: output of the stage before; None on the first.

        Returns:
            Hidden states for the next stage; on the last stage, embeddings ``[tokens, H]`` of the
            language model's width.
        """
        ((name, encoder),) = self.encoders.items()
        output = encoder(**encoder_inputs[name], hidden_states=hidden_states)
        if self.is_last_stage:
            output = self.project_embeddings([output])
            if not len(encoder_inputs[name]["tiles"]):
                output = output[:0]  # only now: norm kernels take no empty tensors
        # The schedule frees the output once it is sent, and for one tile it would be a view.
        return make_viewless_tensor(output, output.requires_grad, keep_graph=True)
