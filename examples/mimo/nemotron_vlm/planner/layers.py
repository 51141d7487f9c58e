# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Work and activations of one layer on one rank, for the fused layers of GPUs.

Operations are counted as by Megatron (``num_floating_point_operations``), with two differences: the
width of Mamba-2 is that of its heads, not twice the hidden size; and the router is counted. What is
kept for the backward is counted tensor by tensor; the residual, which two layers share, once.
"""

from functools import cache
from typing import NamedTuple

from examples.mimo.common.layout import Batch, Layout
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset

CONV_KERNEL, GDN_CHUNK = 4, 64
"""Gated delta nets: their convolution's kernel, Megatron's default; and tokens of a chunk."""
RECOMPUTED = {"none": "", "moe": "E", "full": "*MGE-"}
"""Kinds of layers that run again in the backward, by recompute setting."""


class Layer(NamedTuple):
    """One layer's share of a microbatch on one rank; numbers of elements."""

    # Operations of the forward: gemm, attention, scan (Mamba-2), delta (gated delta net), experts.
    work: dict[str, float]
    norm: float  # its norm's input, output and inverse deviations, kept for the backward
    kept: float  # in all from the forward for the backward
    for_weights: float  # of these, inputs of products that the weights' gradients alone need
    largest: float  # of the largest tensor


def tokens_of(lay: Layout, batch: Batch) -> float:
    """Return a rank's tokens of a microbatch, with sequence parallelism."""
    return batch.micro_size * batch.seq_length / lay.cp / lay.tp


@cache
def language_layer(kind: str, p: LanguagePreset, lay: Layout, batch: Batch) -> Layer:
    """Return a layer of the language model by its letter in the pattern, without recompute."""
    h = inputs = p.hidden_size
    if kind == "*":
        q, kv = p.num_attention_heads * p.kv_channels, 2 * p.num_query_groups * p.kv_channels
        gemm, other = h * (2 * q + kv), {"attention": 2 * batch.seq_length * q}
        kept, largest = 2 * q + kv + p.num_attention_heads, q + kv
    elif kind == "M":
        inner, state = p.mamba_num_heads * p.mamba_head_dim, p.mamba_state_dim
        projected = 2 * inner + 2 * p.mamba_num_groups * state + p.mamba_num_heads
        gemm, other = h * (inner + projected), {"scan": 7 * inner * state}
        kept, largest = projected + 3 * inner, projected
        inputs += inner
    elif kind == "G":
        heads, key = p.linear_num_value_heads, p.linear_num_key_heads * p.linear_key_head_dim
        value, mixed = heads * p.linear_value_head_dim, 2 * key + heads * p.linear_value_head_dim
        projected = mixed + value + 2 * heads
        gemm = h * (projected + value)
        other = {"delta": 2 * (CONV_KERNEL * mixed + 4 * value * p.linear_value_head_dim)}
        # Queries and keys are repeated for all value heads.
        kept = projected + mixed + 2 * heads * p.linear_key_head_dim + 3 * value + heads * GDN_CHUNK
        largest = 2 * (key + value)
        inputs += value
    elif kind == "E":
        ffn, sent = p.moe_ffn_hidden_size, p.moe_router_topk
        shared = p.moe_shared_expert_intermediate_size
        gemm, other = h * (2 * shared + p.num_experts), {"experts": 4 * h * ffn * sent}
        kept = 2 * shared + 2 * p.num_experts + sent * (10 + lay.etp * h + 3 * ffn)
        largest = sent * max(lay.etp * h, ffn)
        inputs += shared + sent * (lay.etp * h + ffn)
    else:
        ffn = p.ffn_hidden_size or 4 * h
        gemm, other, kept, largest = 2 * h * ffn, {}, 2 * ffn, ffn
        inputs += ffn
    tokens = tokens_of(lay, batch)
    work = {kind: tokens * each for kind, each in ({"gemm": 2 * gemm} | other).items()}
    norm = tokens * (2 * h + 1)
    kept, inputs, largest = norm + tokens * kept, tokens * inputs, tokens * largest
    return Layer(work, norm, kept, inputs, largest)
