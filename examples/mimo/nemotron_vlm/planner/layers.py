# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Work and memory of one layer on one rank: operations, elements kept, elements exchanged over CP.

Operations are counted as by Megatron (``num_floating_point_operations``), with two differences: the
width of Mamba-2 is that of its heads, not twice the hidden size; and the router is counted.

*Fused* layers are those of GPUs (Transformer Engine, mamba-ssm, flash-linear-attention); the others
are Megatron's own with the PyTorch reference ops, which keep more. Norms, attention projections and
MLPs are counted tensor by tensor. The residual, which two layers share, is counted once.
"""

from dataclasses import dataclass
from functools import cache, cached_property

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset

BACKWARD = 2.0
"""Work of a backward, in forwards."""
CONV_KERNEL = 4
"""Kernel size of gated delta nets' convolution; Megatron's default in all presets."""
SSD_CHUNK, GDN_CHUNK = 128, 64
"""Tokens of a chunk in Megatron's Mamba-2, and in the gated delta rule."""
RECOMPUTED = {"none": "", "moe": "E", "full": "*MGE-"}
"""Kinds of layers that run again in the backward, by recompute setting."""


@dataclass(frozen=True)
class RankBatch:
    """A microbatch on one rank of the language model.

    p: sizes of the model. lay: its layout. samples: sequences of the microbatch on a DP rank, of
    seq_length tokens. fused: whether layers are fused.
    """

    p: LanguagePreset
    lay: Layout
    samples: int
    seq_length: int
    fused: bool

    @cached_property
    def tokens(self) -> float:
        """Tokens of the rank, with sequence parallelism."""
        return self.samples * self.seq_length / self.lay.cp / self.lay.tp

    @property
    def links(self) -> int:
        """Runs of tokens, over all CP ranks, that recurrent layers pass a state to; zigzag."""
        return 2 * self.lay.cp * self.samples


@dataclass(frozen=True)
class Layer:
    """One layer's share of a microbatch on one rank."""

    # Operations of the forward: gemm, attention, scan (Mamba-2), delta (gated delta net), experts.
    work: dict[str, float]
    kept: float  # elements kept from the forward for the backward
    largest: float = 0.0  # elements of the largest tensor
    gathered: float = 0.0  # elements that context parallelism gathers
    states: float = 0.0  # fp32 elements of recurrent states that it gathers

    @property
    def running(self) -> float:
        """Elements held in the backward before any is freed.

        In addition to what is kept, these are the gradients of one operation's inputs and outputs:
        at most twice the largest tensor.
        """
        return self.kept + 2 * self.largest


@cache
def language_layer(kind: str, batch: RankBatch) -> Layer:
    """Return a layer of the language model by its letter in the pattern, without recompute."""
    count = {"*": _attention, "M": _mamba, "G": _gated_delta, "E": _experts, "-": _mlp}[kind]
    return count(batch)


def kept_with_recompute(kind: str, batch: RankBatch, again: str) -> float:
    """Return the elements that one layer keeps if ``again`` is recomputed: none, moe or full."""
    if kind not in RECOMPUTED[again]:
        return language_layer(kind, batch).kept
    return batch.tokens * (batch.p.hidden_size if again == "full" else _norm(batch))


def _norm(batch: RankBatch) -> int:
    """Count a norm's input, output and inverse deviation, per token; PyTorch's keeps one more."""
    return (2 if batch.fused else 3) * batch.p.hidden_size + 1


def _attention(batch: RankBatch) -> Layer:
    p, lay, tokens, heads = batch.p, batch.lay, batch.tokens, batch.p.num_attention_heads
    q, kv = heads * p.kv_channels, 2 * p.num_query_groups * p.kv_channels
    gathered = kv * lay.cp
    kept = _norm(batch) + (2 if batch.fused else 3) * q + kv + heads
    if lay.cp > 1 and not batch.fused:
        kept += gathered
    work = {
        "gemm": 2 * tokens * p.hidden_size * (2 * q + kv),
        "attention": 2 * tokens * batch.seq_length * q,
    }
    return Layer(work, tokens * kept, tokens * (q + kv), gathered=tokens * gathered)


def _mamba(batch: RankBatch) -> Layer:
    p, lay, tokens, heads = batch.p, batch.lay, batch.tokens, batch.p.mamba_num_heads
    inner = heads * p.mamba_head_dim
    groups, state = p.mamba_num_groups, p.mamba_state_dim
    mixed = inner + 2 * groups * state
    projected, largest = inner + mixed + heads, inner + mixed + heads
    if batch.fused:
        kept = projected + 3 * inner
    else:
        chunk = min(SSD_CHUNK, batch.seq_length / lay.cp)
        between_tokens = (2 * heads + groups) * chunk
        states = 2 * inner * state / chunk + 2 * heads * state
        kept = projected + 3 * mixed + 10 * inner + 2 * groups * state + between_tokens + states
        largest = max(largest, heads * chunk)
    work = {
        "gemm": 2 * tokens * p.hidden_size * (inner + projected),
        "scan": 7 * tokens * inner * state,
    }
    states = batch.links * inner * state / lay.tp
    return Layer(work, tokens * (_norm(batch) + kept), tokens * largest, states=states)


def _gated_delta(batch: RankBatch) -> Layer:
    p, lay, tokens, heads = batch.p, batch.lay, batch.tokens, batch.p.linear_num_value_heads
    key, value = p.linear_num_key_heads * p.linear_key_head_dim, heads * p.linear_value_head_dim
    projected, mixed, largest = 2 * (key + value + heads), 2 * key + value, 2 * (key + value)
    repeated = 2 * heads * p.linear_key_head_dim  # queries and keys repeated for all value heads
    if batch.fused:
        kept = projected + mixed + repeated + 3 * value + heads * GDN_CHUNK
    else:
        chunk = min(GDN_CHUNK, batch.seq_length / lay.cp)
        kept = projected + 3 * mixed + 9 * value + 6 * repeated + 5.25 * heads * chunk
        largest = max(largest, heads * chunk)
    work = {
        "gemm": 2 * tokens * p.hidden_size * (projected + value),
        "delta": 2 * tokens * (CONV_KERNEL * mixed + 4 * value * p.linear_value_head_dim),
    }
    states = batch.links * value * p.linear_key_head_dim / lay.tp
    return Layer(work, tokens * (_norm(batch) + kept), tokens * largest, states=states)


def _experts(batch: RankBatch) -> Layer:
    p, lay, tokens = batch.p, batch.lay, batch.tokens
    h, ffn = p.hidden_size, p.moe_ffn_hidden_size
    shared, sent = p.moe_shared_expert_intermediate_size, p.moe_router_topk
    kept = _norm(batch) + 2 * shared + 2 * p.num_experts + 10 * p.moe_router_topk
    kept += sent * lay.etp * (h + 3 * ffn / lay.etp)
    work = {
        "gemm": 2 * tokens * h * (2 * shared + p.num_experts),
        "experts": 4 * tokens * h * ffn * sent,
    }
    return Layer(work, tokens * kept, tokens * sent * lay.etp * max(h, ffn / lay.etp))


def _mlp(batch: RankBatch) -> Layer:
    p, tokens, ffn = batch.p, batch.tokens, batch.p.ffn_hidden_size or 4 * batch.p.hidden_size
    work = {"gemm": 4 * tokens * p.hidden_size * ffn}
    return Layer(work, tokens * (_norm(batch) + 2 * ffn), tokens * ffn)


def head(batch: RankBatch) -> Layer:
    """Return the final norm and the logits of one microbatch.

    In bytes, with Megatron's loss, each logit has an fp32 softmax, and with fused layers an fp32
    gradient as well.
    """
    p, tokens = batch.p, batch.tokens
    work = {"gemm": 2 * tokens * p.hidden_size * p.vocab_size}
    return Layer(work, tokens * (_norm(batch) + p.vocab_size))
