# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The encoder's sizes and names in Hugging Face models."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import (
    Files,
    Part,
    Table,
    TensorRows,
    interleaved,
)

if TYPE_CHECKING:
    from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio

VIDEO_EMBEDDER = "model.patch_generator.video_embedder.weight"

TOP = {
    "class_token": "model.patch_generator.cls_token.token",
    "position_embeddings": "model.patch_generator.pos_embed",
    "embedder.weight": "model.patch_generator.embedder.weight",
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


class RadioPart(Part):
    """The ViT, with timm's names of blocks, as C-RADIO is published."""

    expected = {
        "hidden_act": "gelu",
        "layerscale_value": 1.0,
        "num_channels": 3,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
    }
    same = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "patch": "patch_size",
        "max_tile": "max_img_size",
        "norm_epsilon": "layer_norm_eps",
    }
    # Pixels are normalized by values in the preset, there is no summary, and maybe no video.
    unneeded = (MEAN, STD, SCALES, "summary_idxs", VIDEO_EMBEDDER)

    def sizes(self, base: Radio, config: Any, files: Files) -> Radio:
        """See `Part`; the files' mean and deviation of pixels replace the configuration's."""
        tile, tubelet = config.image_size, config.video_temporal_patch_size or 1
        if tile % (config.patch_size * base.pixel_shuffle) or tile > config.max_img_size:
            raise UserError(
                f"the encoder's image_size is {tile}: ours takes multiples of "
                f"{config.patch_size * base.pixel_shuffle} up to {config.max_img_size}"
            )
        pixels = {"pixel_mean": tuple(config.norm_mean), "pixel_std": tuple(config.norm_std)}
        for field, name in zip(pixels, (MEAN, STD), strict=True):
            if self.theirs + name in files.shapes:
                pixels[field] = tuple(files.read(self.theirs + name).flatten().tolist())
        return replace(
            super().sizes(base, config, files),
            ffn=int(config.hidden_size * config.mlp_ratio),
            tile=tile,
            class_tokens=config.num_cls_tokens + config.num_registers,
            tubelet=tubelet if base.tubelet > 1 else 1,
            **pixels,
        )

    def fields(self, sizes: Radio) -> dict[str, Any]:
        return {
            **super().fields(sizes),
            "model_type": "radio",
            "mlp_ratio": sizes.ffn / sizes.hidden,
            "image_size": sizes.tile,
            "num_cls_tokens": min(3, sizes.class_tokens),
            "num_registers": max(0, sizes.class_tokens - 3),
            "norm_mean": list(sizes.pixel_mean),
            "norm_std": list(sizes.pixel_std),
            "video_temporal_patch_size": max(2, sizes.tubelet),  # theirs always embeds video
        }

    def table(self, sizes: Radio) -> Table:
        top = TOP | ({"video_embedder.weight": VIDEO_EMBEDDER} if sizes.tubelet > 1 else {})
        table = {ours: (TensorRows(theirs),) for ours, theirs in top.items()}
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

    def not_held(self, files: Files) -> list[str]:
        """See `Part`; scaling factors must all be 1."""
        names = super().not_held(files)
        scales = fnmatch.filter(names, self.theirs + SCALES)
        if wrong := [name for name in scales if not torch.all(files.read(name) == 1)]:
            raise UserError("the encoder has factors that ours lacks: " + ", ".join(wrong))
        return names
