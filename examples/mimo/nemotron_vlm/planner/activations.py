# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Elements that layers keep from their forward for their backward, on one rank.

*Fused* layers are those of GPUs (Transformer Engine, mamba-ssm, flash-linear-attention); the others
are Megatron's own with the PyTorch reference ops, which keep more. Norms, attention projections and
MLPs are counted tensor by tensor. The residual, which two layers share, is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset, VLMPreset

SSD_CHUNK, GDN_CHUNK = 128, 64
"""Tokens of a chunk in Megatron's Mamba-2, and in the gated delta rule."""

KEPT_FOR_LAYER = {"none": "", "moe": "E", "full": "*MGE-"}
"""Kinds of layers that run again in the backward, by recompute setting."""


@dataclass(frozen=True)
class Rows:
    """A microbatch on a language DP rank, with the properties that decide what layers keep of it.

    samples: number of sequences of ``seq_length`` tokens. fused: whether layers are fused.
    imbalance: tokens of the rank with the busiest experts over the mean.
    """

    samples: int
    seq_length: int
    fused: bool
    imbalance: float = 1.0


def language_layer(layer: str, p: LanguagePreset, lay: Layout, rows: Rows) -> float:
    """Return the elements that one layer keeps of one microbatch without recompute."""
    tokens = rows.samples * rows.seq_length / lay.cp
    return tokens * _per_token(layer, p, lay, rows)


def recomputed_layer(layer: str, p: LanguagePreset, lay: Layout, rows: Rows, again: str) -> float:
    """Return the elements that one layer keeps if ``again`` is recomputed: none, moe or full."""
    if layer not in KEPT_FOR_LAYER[again]:
        return language_layer(layer, p, lay, rows)
    tokens = rows.samples * rows.seq_length / lay.cp
    kept = p.hidden_size if again == "full" else _norm(p.hidden_size, rows.fused)
    return tokens * kept / lay.tp


def _norm(hidden: int, fused: bool) -> int:
    """Count a norm's input, output and inverse deviation, per token; PyTorch's keeps one more."""
    return (2 if fused else 3) * hidden + 1


def _per_token(layer: str, p: LanguagePreset, lay: Layout, rows: Rows) -> float:
    kept = _norm(p.hidden_size, rows.fused) / lay.tp
    if layer == "*":
        q, kv = p.num_attention_heads * p.kv_channels, 2 * p.num_query_groups * p.kv_channels
        copies = 2 if rows.fused else 3
        gathered = kv * lay.cp if lay.cp > 1 and not rows.fused else 0
        return kept + (copies * q + kv + gathered + p.num_attention_heads) / lay.tp
    if layer == "M":
        return kept + _mamba(p, lay, rows) / lay.tp
    if layer == "G":
        return kept + _gated_delta(p, lay, rows) / lay.tp
    if layer == "E":
        shared = 2 * p.moe_shared_expert_intermediate_size / lay.tp
        router = (2 * p.num_experts + 10 * p.moe_router_topk) / lay.tp
        sent = p.moe_router_topk * rows.imbalance * lay.etp / lay.tp
        expert = p.hidden_size + 3 * p.moe_ffn_hidden_size / lay.etp
        return kept + shared + router + sent * expert
    return kept + 2 * (p.ffn_hidden_size or 4 * p.hidden_size) / lay.tp


def running_layer(layer: str, p: LanguagePreset, lay: Layout, rows: Rows) -> float:
    """Return the elements that one layer holds in its backward, before any of them is freed.

    In addition to what it keeps, these are the gradients of one operation's inputs and outputs: at
    most twice the layer's largest tensor.
    """
    chunk = rows.seq_length / lay.cp
    if layer == "*":
        largest = (p.num_attention_heads + 2 * p.num_query_groups) * p.kv_channels
    elif layer == "M":
        inner = p.mamba_num_heads * p.mamba_head_dim
        largest = 2 * inner + 2 * p.mamba_num_groups * p.mamba_state_dim + p.mamba_num_heads
        if not rows.fused:
            largest = max(largest, p.mamba_num_heads * min(SSD_CHUNK, chunk))
    elif layer == "G":
        value = p.linear_num_value_heads * p.linear_value_head_dim
        largest = 2 * (p.linear_num_key_heads * p.linear_key_head_dim + value)
        if not rows.fused:
            largest = max(largest, p.linear_num_value_heads * min(GDN_CHUNK, chunk))
    elif layer == "E":
        widest = max(p.hidden_size, p.moe_ffn_hidden_size / lay.etp)
        largest = p.moe_router_topk * rows.imbalance * lay.etp * widest
    else:
        largest = p.ffn_hidden_size or 4 * p.hidden_size
    tokens = rows.samples * rows.seq_length / lay.cp
    return language_layer(layer, p, lay, rows) + 2 * tokens * largest / lay.tp


def _mamba(p: LanguagePreset, lay: Layout, rows: Rows) -> float:
    heads, groups, state = p.mamba_num_heads, p.mamba_num_groups, p.mamba_state_dim
    inner = heads * p.mamba_head_dim
    mixed = inner + 2 * groups * state
    projected = inner + mixed + heads
    if rows.fused:
        return projected + 3 * inner
    chunk = min(SSD_CHUNK, rows.seq_length / lay.cp)
    between_tokens = (2 * heads + groups) * chunk
    states = 2 * heads * p.mamba_head_dim * state / chunk + 2 * heads * state
    return projected + 3 * mixed + 10 * inner + 2 * groups * state + between_tokens + states


def _gated_delta(p: LanguagePreset, lay: Layout, rows: Rows) -> float:
    key = p.linear_num_key_heads * p.linear_key_head_dim
    heads = p.linear_num_value_heads
    value = heads * p.linear_value_head_dim
    projected, mixed = 2 * (key + value + heads), 2 * key + value
    repeated = 2 * heads * p.linear_key_head_dim  # queries and keys repeated for all value heads
    if rows.fused:
        return projected + mixed + repeated + 3 * value + heads * GDN_CHUNK
    chunk = min(GDN_CHUNK, rows.seq_length / lay.cp)
    return projected + 3 * mixed + 9 * value + 6 * repeated + 5.25 * heads * chunk


def encoder_tile(preset: VLMPreset, lay: Layout, first: bool = True, last: bool = True) -> float:
    """Return the elements that one stage of encoder and projector keeps of one tile."""
    e = preset.encoder
    patches = (e.tile // e.patch) ** 2
    layer = 4 * e.hidden + 4 + (4 * e.hidden + 2 * e.ffn + e.heads) / lay.tp
    kept = (patches + e.class_tokens) * layer * e.layers / lay.pp
    if first:
        kept += 3 * e.tile**2
    if last:
        row = 3 * e.output_size + 1 + 2 * preset.projector_ffn / lay.tp
        kept += e.tokens_per_tile * row
    return kept


def head(p: LanguagePreset, lay: Layout, rows: Rows) -> float:
    """Return the logits of one microbatch and the elements that the final norm keeps of it.

    In bytes, each logit has an fp32 softmax, and with fused layers an fp32 gradient as well.
    """
    tokens = rows.samples * rows.seq_length / lay.cp
    return tokens * (_norm(p.hidden_size, rows.fused) + p.vocab_size) / lay.tp
