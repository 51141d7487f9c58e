# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that is smaller than the program's own."""

from examples.mimo.nemotron_vlm.encoders.radio import Radio
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset, VLMPreset

PRESET = VLMPreset(
    name="test",
    encoders=(
        Radio(
            **{"layers": 1, "hidden": 16, "heads": 4, "ffn": 32, "projector_ffn": 32},
            **{"patch": 4, "tile": 8, "max_tile": 8, "class_tokens": 2},
        ),
    ),
    language=LanguagePreset(
        hybrid_layer_pattern="ME*E",
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        mamba_num_heads=8,
        mamba_head_dim=4,
        mamba_num_groups=4,
        mamba_state_dim=8,
        vocab_size=32,
    ),
)
"""A tile is one token. Encoder tp=4 and language tp=2, cp=2, ep=8, etp=2 divide it."""
