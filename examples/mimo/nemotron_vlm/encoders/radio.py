# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The entry of images: RADIO ViT, pixel shuffle and projector, on square tiles of one size."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.data.sample import IMAGE, IMAGES
from examples.mimo.nemotron_vlm.encoders.entry import Configs, Encoder
from examples.mimo.nemotron_vlm.encoders.hugging_face import (
    Files,
    Part,
    Table,
    TensorRows,
    check_values,
    interleaved,
)
from examples.mimo.nemotron_vlm.encoders.stage import (
    ProjectorPart,
    projector_config,
    stage_spec,
)
from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs
from megatron.core.models.mimo.forward.flops import mlp_flops, vit_flops
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Radio(Encoder):
    """Sizes of the RADIO ViT. A tile is a square image of ``tile`` × ``tile`` pixels, 3 channels.

    projector_ffn: the projector's inner width. pixel_mean, pixel_std: mean and deviation by
    channel, for normalizing pixels in [0, 1].
    """

    name = IMAGES
    key = "radio"
    token = IMAGE

    layers: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    tile: int
    max_tile: int
    projector_ffn: int
    class_tokens: int = 8
    pixel_shuffle: int = 2
    norm_epsilon: float = 1e-5
    pixel_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    pixel_std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def tokens_per_tile(self) -> int:
        """Rows that one tile becomes in the language model's sequence."""
        return (self.tile // self.patch // self.pixel_shuffle) ** 2

    @property
    def output_size(self) -> int:
        """Features of one of these rows before the projector."""
        return self.hidden * self.pixel_shuffle**2

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return (self.tile // self.patch) ** 2

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """See `Encoder`; tiles have one size."""
        return np.full(len(sizes), self.tokens_per_tile)

    def work(self, sizes: np.ndarray, width: int) -> dict[str, np.ndarray]:
        shape = self.layers, self.hidden, self.ffn, 3 * self.patch**2
        vit = vit_flops(self.patches, self.patches + self.class_tokens, *shape)
        mlp = mlp_flops(self.tokens_per_tile, (self.output_size, self.projector_ffn, width))
        return {"vit": np.full(len(sizes), int(vit)), "gemm": np.full(len(sizes), int(mlp))}

    def collate(self, parts: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """See `Encoder`; parts are tiles uint8 [n, 3, H, W]."""
        none = torch.empty(0, 3, self.tile, self.tile, dtype=torch.uint8)
        return {"tiles": torch.cat([none, *parts])}

    def divided(self) -> dict[str, int]:
        return {
            "attention heads": self.heads,
            "features": self.hidden,
            "FFN rows": self.ffn,
            "projector rows": self.projector_ffn,
        }

    def configs(self, shared: Mapping[str, Any], width: int) -> Configs:
        encoder = TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            ffn_hidden_size=self.ffn,
            normalization="LayerNorm",
            layernorm_epsilon=self.norm_epsilon,
            activation_func=F.gelu,
            add_bias_linear=True,
            **shared,
        )
        projector = projector_config(shared, width, self.projector_ffn, self.heads)
        return {"encoder": encoder, "projector": projector}

    def spec(
        self, configs: Configs, specs: LayerSpecs, groups: ProcessGroupCollection | None
    ) -> ModuleSpec:
        radio = dict(config=configs["encoder"], layer_spec=specs.vit_layer, sizes=self)
        encoder = ModuleSpec(module=RADIOEncoderWrapper, params=radio | {"pg_collection": groups})
        projector = configs["projector"]
        return stage_spec(self.key, encoder, self.output_size, projector, specs, groups)

    def kept(self, layout: Layout, first: bool = True, last: bool = True) -> float:
        layer = 4 * self.hidden + 4 + (4 * self.hidden + 2 * self.ffn + self.heads) / layout.tp
        row = 3 * self.output_size + 1 + 2 * self.projector_ffn / layout.tp
        kept = (self.patches + self.class_tokens) * layer * self.layers / layout.pp
        return kept + 3 * self.tile**2 * first + self.tokens_per_tile * row * last

    def reduced(self) -> int:
        return (self.patches + self.class_tokens) * self.hidden

    def parts(self) -> tuple[Part, ...]:
        module = f"modality_submodules.{self.name}."
        ours = f"{module}encoders.{self.key}.radio."
        encoder = RadioPart("encoder", ours, "vision_model.", "", "vision_config", "radio")
        ours = f"{module}input_projections.0."
        return encoder, ProjectorPart("projector", ours, "mlp1.", "mlp1.")


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

    Args:
        config: configuration of the ViT; sequence parallelism must be off.
        layer_spec: spec of its transformer layers.
        sizes: image geometry.
        pg_collection: the encoder's process groups. In a pipeline, the first stage embeds the
            patches, and the last one applies the pixel shuffle.
    """

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
        self.radio = RADIOViTModel(
            transformer_config=config,
            transformer_layer_spec=layer_spec,
            class_token_len=sizes.class_tokens,
            patch_dim=sizes.patch,
            img_h=sizes.tile,
            img_w=sizes.tile,
            max_img_h=sizes.max_tile,
            max_img_w=sizes.max_tile,
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
        """Encode tiles; without any, encode a blank one, whose output the caller drops.

        Args:
            tiles: [n, 3, H, W], pixels in 0 … 255; n may be 0. Only the first stage reads them.
            hidden_states: [n or 1, patches and class tokens, hidden], output of the stage before.

        Returns:
            [(n or 1) · tokens_per_tile, output_size], or hidden states for the next stage.
        """
        if self.is_first_stage:
            encoded = tiles if len(tiles) else tiles.new_zeros(1, *tiles.shape[1:])
            pixels = normalize(encoded, self.sizes)
            features = self.radio(pixels.to(self.config.params_dtype))
        else:
            self.radio.decoder.set_input_tensor(hidden_states.transpose(0, 1).contiguous())
            features = self.radio.decoder(None, attention_mask=None).transpose(0, 1)
        if not self.is_last_stage:
            return features.contiguous()
        patches = features[:, self.sizes.class_tokens :]
        rows = self.sizes.tile // self.sizes.patch
        return pixel_shuffle(patches, rows, self.sizes.pixel_shuffle).flatten(0, 1)


EMBEDDER = "model.patch_generator.embedder.weight"
"""Name of the embedder's weight, after a file's common prefix, mostly ``radio_model.``."""

EXPECTED = {
    "hidden_act": "gelu",
    "layerscale_value": 1.0,
    "num_channels": 3,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
}
"""Fields of a RadioConfig for which our model supports one value."""

TOP = {
    "class_token": "model.patch_generator.cls_token.token",
    "position_embeddings": "model.patch_generator.pos_embed",
    "embedder.weight": EMBEDDER,
}

BLOCK = {
    "self_attention.linear_qkv.layer_norm_weight": "norm1.weight",
    "self_attention.linear_qkv.layer_norm_bias": "norm1.bias",
    "self_attention.linear_proj.weight": "attn.proj.weight",
    "self_attention.linear_proj.bias": "attn.proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "norm2.weight",
    "mlp.linear_fc1.layer_norm_bias": "norm2.bias",
    "mlp.linear_fc1.weight": "mlp.fc1.weight",
    "mlp.linear_fc1.bias": "mlp.fc1.bias",
    "mlp.linear_fc2.weight": "mlp.fc2.weight",
    "mlp.linear_fc2.bias": "mlp.fc2.bias",
}
"""Tensors that differ in name only: one for all layers in ours, below ``blocks.N`` in theirs."""

MEAN, STD = "input_conditioner.norm_mean", "input_conditioner.norm_std"

SCALES = "model.blocks.*.layer_scale?.lambda1"
"""Pattern of scaling factors that our model does not have: they must all be 1."""

NOT_HELD = (MEAN, STD, SCALES, "summary_idxs", "model.patch_generator.video_embedder.weight")
"""Patterns of tensors that our model does not have: pixels are normalized by values in the preset,
and there is neither a summary nor video."""


class RadioPart(Part):
    """The ViT, with timm's names of blocks, as C-RADIO is published."""

    def outer(self, files: Files, prefix: str) -> str:
        if not files.shapes:
            return prefix + "radio_model."
        names = [n for n in files.shapes if n.startswith(prefix) and n.endswith(EMBEDDER)]
        if len(names) != 1:
            raise UserError(f"{files.directory}: no encoder: no tensor {prefix}…{EMBEDDER}")
        return names[0].removesuffix(EMBEDDER)

    def sizes(self, base: Radio, config: Any, files: Files, outer: str, tile: int | None) -> Radio:
        """See `Part`; the files' mean and deviation of pixels replace the configuration's."""
        check_values("the encoder", config, EXPECTED)
        tile = tile or config.image_size
        if tile % (config.patch_size * base.pixel_shuffle) or tile > config.max_img_size:
            raise UserError(
                f"--tile {tile}: give a multiple of {config.patch_size * base.pixel_shuffle} up to "
                f"{config.max_img_size}"
            )
        pixels = {"pixel_mean": tuple(config.norm_mean), "pixel_std": tuple(config.norm_std)}
        for field, name in zip(pixels, (MEAN, STD), strict=True):
            if outer + name in files.shapes:
                pixels[field] = tuple(files.read(outer + name).flatten().tolist())
        return replace(
            base,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            ffn=int(config.hidden_size * config.mlp_ratio),
            patch=config.patch_size,
            tile=tile,
            max_tile=config.max_img_size,
            class_tokens=config.num_cls_tokens + config.num_registers,
            norm_epsilon=config.layer_norm_eps,
            **pixels,
        )

    def table(self, sizes: Radio) -> Table:
        table = {ours: (TensorRows(theirs),) for ours, theirs in TOP.items()}
        for number in range(sizes.layers):
            theirs = f"model.blocks.{number}."
            for name, other in BLOCK.items():
                table[f"decoder.layers.{name}[{number}]"] = (TensorRows(theirs + other),)
            heads = (sizes.heads, sizes.heads, sizes.hidden // sizes.heads)
            for kind in ("weight", "bias"):
                theirs = f"model.blocks.{number}.attn.qkv.{kind}"
                qkv = [TensorRows(theirs, start * sizes.hidden) for start in range(3)]
                name = f"decoder.layers.self_attention.linear_qkv.{kind}[{number}]"
                table[name] = interleaved(qkv, *heads)
        return table

    def not_held(self, files: Files, outer: str) -> list[str]:
        """See `Part`; scaling factors must all be 1."""
        patterns = [outer + pattern for pattern in NOT_HELD]
        names = [n for n in files.shapes if any(fnmatch.fnmatchcase(n, each) for each in patterns)]
        scales = fnmatch.filter(names, outer + SCALES)
        if wrong := [name for name in scales if not torch.all(files.read(name) == 1)]:
            raise UserError("the encoder has factors that ours lacks: " + ", ".join(wrong))
        return names
