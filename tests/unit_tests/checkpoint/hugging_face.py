# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Small random Hugging Face models, of transformers' own classes, written as they are published."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from conversion.whole_models import their_config
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset, tiny_omni

SHARD = "20KB"
"""Size of a file, small enough that there are several."""

LANGUAGE: LanguagePreset = replace(
    tiny_omni().language,
    hybrid_layer_pattern="ME*-ME*-",
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    mamba_num_heads=8,
    mamba_state_dim=8,
    moe_router_topk_scaling_factor=1.5,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=24,
)
"""Two layers of each kind; tp=2, pp=2 and ep=2 divide it."""

IMAGES, SOUND = tiny_omni().encoders
SMALL = {"hidden": 32, "heads": 4, "ffn": 64, "projector_ffn": 48, "max_tile": 32}
ENCODERS = (
    replace(IMAGES, **SMALL, class_tokens=5, norm_epsilon=1e-6),
    replace(SOUND, intermediate_size=48, num_mel_bins=32, projector_ffn=48),
)
"""Tiles of 4 by 4 patches, and positions for 8 by 8; and sound."""


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Fill all weights so that every one matters to an output of the size of one."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("norm_mean", "norm_std", "summary_idxs", "lambda1", "_tracked")):
                continue
            noise = torch.randn(tensor.shape, generator=rng)
            if name.endswith(("A_log", "running_var")):
                tensor.copy_(noise.abs())
            elif tensor.ndim > 1 and "position" not in name:
                tensor.copy_(noise * 0.7 * tensor[0].numel() ** -0.5)
            else:
                is_scale = "norm" in name and name.endswith("weight")
                tensor.copy_(noise * 0.3 + is_scale)
    return model.eval()


def whole_vlm(sound: bool = True) -> NemotronH_Omni_Reasoning_V3:
    """A random model of the published VLM's class, with or without its encoder of sound."""
    preset = replace(tiny_omni(), language=LANGUAGE, encoders=ENCODERS[: 1 + sound])
    config = their_config(preset, {each.name: each.token for each in ENCODERS})
    # transformers chooses kernels, which take tensors of a GPU alone, when it imports the layer.
    with pytest.MonkeyPatch.context() as hidden:
        for name in ("causal_conv1d", "mamba_ssm"):
            hidden.setitem(sys.modules, name, None)
        importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h")
    model = NemotronH_Omni_Reasoning_V3(config)
    # As released, in files: the model here neither prunes rows nor raises time steps, as ours.
    config.video_pruning_rate, config.text_config.time_step_min = 0.5, 0.001
    return randomized(model)


def save(model: nn.Module, directory: Path) -> Path:
    """Write a model in several files."""
    model.save_pretrained(directory, max_shard_size=SHARD)
    return directory
