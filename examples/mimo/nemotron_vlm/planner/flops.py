# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a layer's forward on one rank; its backward has twice as many.

They are counted as by Megatron (``num_floating_point_operations``), with two differences: the width
of Mamba-2 is that of its heads, not twice the hidden size; and the router is counted.
"""

from __future__ import annotations

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset, VLMPreset
from examples.mimo.nemotron_vlm.planner.parameters import CONV_KERNEL

BACKWARD = 2.0
"""Work of a backward, in forwards."""

Work = dict[str, float]
"""Operations by kind: gemm, attention, scan (Mamba-2), delta (gated delta net), experts, vit."""


def language_layer(layer: str, p: LanguagePreset, lay: Layout, samples: int, seq: int) -> Work:
    """Count one layer's forward of one microbatch, with perfectly balanced experts."""
    tokens, h = samples * seq / lay.cp / lay.tp, p.hidden_size
    if layer == "*":
        q, kv = p.num_attention_heads * p.kv_channels, p.num_query_groups * p.kv_channels
        return {"gemm": 4 * tokens * h * (q + kv), "attention": 2 * tokens * seq * q}
    if layer == "M":
        inner, heads = p.mamba_num_heads * p.mamba_head_dim, p.mamba_num_heads
        mixed = inner + 2 * p.mamba_num_groups * p.mamba_state_dim
        projections = 2 * tokens * h * (2 * inner + mixed + heads)
        return {"gemm": projections, "scan": 7 * tokens * inner * p.mamba_state_dim}
    if layer == "G":
        key = p.linear_num_key_heads * p.linear_key_head_dim
        value = p.linear_num_value_heads * p.linear_value_head_dim
        projections = h * (2 * key + 3 * value + 2 * p.linear_num_value_heads)
        rule = CONV_KERNEL * (2 * key + value) + 4 * value * p.linear_value_head_dim
        return {"gemm": 2 * tokens * projections, "delta": 2 * tokens * rule}
    if layer == "E":
        shared = 4 * tokens * h * p.moe_shared_expert_intermediate_size
        router = 2 * tokens * h * p.num_experts
        routed = 4 * tokens * h * p.moe_ffn_hidden_size * p.moe_router_topk
        return {"gemm": shared + router, "experts": routed}
    return {"gemm": 4 * tokens * h * (p.ffn_hidden_size or 4 * h)}


def head(p: LanguagePreset, lay: Layout, samples: int, seq: int) -> Work:
    """Count the logits of one microbatch."""
    return {"gemm": 2 * samples * seq / lay.cp / lay.tp * p.hidden_size * p.vocab_size}


def encoder_tile(preset: VLMPreset, lay: Layout) -> Work:
    """Count a stage's even share of encoder and projector on one tile."""
    share = (1 + BACKWARD) * lay.tp * lay.pp
    projector = preset.projector_flops_per_tile
    return {"vit": (preset.flops_per_tile - projector) / share, "gemm": projector / share}


def of_sample(preset: VLMPreset, seq: int, tiles: float) -> float:
    """Return the operations of forward and backward of one sample, for reported throughput."""
    one, p = Layout(dp=1, etp=1), preset.language
    works = [language_layer(k, p, one, 1, seq) for k in p.hybrid_layer_pattern.replace("|", "")]
    forward = sum(sum(work.values()) for work in (*works, head(p, one, 1, seq)))
    return (1 + BACKWARD) * forward + tiles * preset.flops_per_tile
