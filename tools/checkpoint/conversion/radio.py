# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Translation of the encoder, a RADIO ViT with timm's names of blocks, as C-RADIO is published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conversion.config_values import check_values
from conversion.nemotron_h import interleaved
from conversion.rows import Rows, Table
from conversion.tensor_files import TensorFiles
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import EncoderPreset

PREFIX = "modality_submodules.images.encoders.radio.radio."
"""Prefix of our names."""

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


def outer_name(files: TensorFiles, prefix: str) -> str:
    """Return the prefix of the encoder's names in a file, after ``prefix``."""
    if not files.shapes:
        return "radio_model."
    found = [name for name in files.shapes if name.startswith(prefix) and name.endswith(EMBEDDER)]
    if len(found) != 1:
        raise UserError(f"{files.directory}: no encoder: no tensor {prefix}…{EMBEDDER}")
    return found[0].removeprefix(prefix).removesuffix(EMBEDDER)


def encoder_preset(
    config: Any, base: EncoderPreset, tile: int | None, files: TensorFiles, outer: str
) -> EncoderPreset:
    """Return the encoder preset for a RadioConfig.

    Args:
        config: transformers' own class.
        files: files whose mean and deviation of pixels replace the configuration's.
        outer: prefix of the encoder's names in the files.
        base: preset with the sizes that the configuration lacks.
        tile: height and width of a tile in pixels; None for the configuration's.

    Raises:
        UserError: our model does not support the tile or a field's value; the message names every
            such field.
    """
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


def check_scales(files: TensorFiles, names: list[str]) -> None:
    """Raise UserError, with the names, if factors are not all 1."""
    wrong = [name for name in names if not torch.all(files.read(name) == 1)]
    if wrong:
        raise UserError("the encoder has factors that ours lacks: " + ", ".join(wrong))


def encoder_table(sizes: EncoderPreset) -> Table:
    """Return the table of the encoder's tensors, without ``PREFIX`` and the file's prefix."""
    table = {ours: (Rows(theirs),) for ours, theirs in TOP.items()}
    for number in range(sizes.layers):
        theirs = f"model.blocks.{number}."
        for name, other in BLOCK.items():
            table[f"decoder.layers.{name}[{number}]"] = (Rows(theirs + other),)
        for kind in ("weight", "bias"):
            qkv = [Rows(f"{theirs}attn.qkv.{kind}", start * sizes.hidden) for start in range(3)]
            heads = (sizes.heads, sizes.heads, sizes.hidden // sizes.heads)
            name = f"decoder.layers.self_attention.linear_qkv.{kind}[{number}]"
            table[name] = interleaved(qkv, *heads)
    return table
