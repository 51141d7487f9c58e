# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""ContextParallelAttention against an explicit masked softmax in fp64."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths, pad_lengths, zigzag_layout
from megatron.core.token_layout.attention_plan import attention_plan
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils, requires_world_size

HEADS, GROUPS, DIM = 6, 2, 8
# Round-off of sums of some tens of terms of order one, against fp64. 16-bit tensors take another
# kernel on a GPU.
TOLERANCES = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    torch.bfloat16: dict(rtol=2e-2, atol=5e-2),
}
MASKS = (AttnMaskType.causal, AttnMaskType.no_mask)
# Odd, empty, below 2·cp, and long samples.
PACKED = (5, 0, 1, 29, 8)


def attention(mask_type=AttnMaskType.causal, cp_group=None, softmax_scale=None, **config):
    cp_size = 1 if cp_group is None else cp_group.size()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        **{"attention_dropout": 0.0, "context_parallel_size": cp_size, **config},
    )
    return ContextParallelAttention(
        config,
        layer_number=1,
        attn_mask_type=mask_type,
        attention_type="self",
        softmax_scale=softmax_scale,
        pg_collection=SimpleNamespace(tp=None, cp=cp_group),
    )


def random_qkv(tokens, batch, dtype=torch.float32):
    """Query, key, value ``[tokens, batch, heads, dim]``, alike on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, batch, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(Utils.device, dtype).requires_grad_() for x in values]


def oracle(query, key, value, lengths, causal, scale=DIM**-0.5):
    """Softmax over an explicit mask, in fp64: ``[tokens, batch, heads * dim]``."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (key, value))
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = sample.unsqueeze(1) == sample
    seen = (seen.tril() if causal else seen).to(query.device)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def packed_call(layer, query, key, value, params):
    """Run on ``thd`` tensors, which have no batch dimension."""
    query, key, value = (x.squeeze(1) for x in (query, key, value))
    return layer(query, key, value, None, packed_seq_params=params).unsqueeze(1)


@pytest.mark.parametrize("mask_type", MASKS)
def test_on_one_rank_boundaries_without_padding_are_enough(mask_type):
    inputs = random_qkv(sum(PACKED), 1)
    bounds = torch.tensor([0, *PACKED]).cumsum(0).to(Utils.device, torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
    context = packed_call(attention(mask_type, softmax_scale=0.7), *inputs, params)
    expected = oracle(*inputs, PACKED, mask_type is AttnMaskType.causal, scale=0.7)
    torch.testing.assert_close(context.double(), expected, **TOLERANCES[torch.float32])
    with pytest.raises(ValueError, match="end at 4, which does not match the 43 tokens"):
        shorter = PaddedLengths((4,), (4,)).packed_seq_params(Utils.device)
        packed_call(attention(), *inputs, shorter)
    with pytest.raises(ValueError, match="full without an attention_mask"):
        attention(AttnMaskType.padding)(*inputs, torch.ones(43, 43).bool())


def test_padding_alone_sees_itself():
    """Some kernels make NaN of queries without keys."""
    ((block,),) = attention_plan(PaddedLengths((0,), (8,)), 2, 0, is_causal=False)
    assert block.keys == 8


@requires_world_size(4)
@pytest.mark.parametrize("cp_size", (4, 3, 2))
class TestContextParallel:
    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("mask_type", MASKS)
    @pytest.mark.parametrize(
        ("lengths", "batch"), (((24,), 3), (PACKED, 1)), ids=("plain", "packed")
    )
    def test_output_and_gradients_match_the_oracle(
        self, group, cp_size, lengths, batch, mask_type, dtype
    ):
        if group is None:
            return
        padded = pad_lengths(lengths, cp_size)
        layout, rank = zigzag_layout(padded, cp_size), group.rank()
        query, key, value = random_qkv(sum(lengths), batch, dtype)
        weight = torch.randn(query.flatten(2).shape, generator=torch.Generator().manual_seed(1))
        weight = weight.to(Utils.device)

        def shard(tensor):
            return layout.shard(padded.pad(tensor), rank)

        layer = attention(mask_type, group)
        shards = [shard(tensor) for tensor in (query, key, value)]
        if batch == 1:
            params = padded.packed_seq_params(Utils.device)
            packed_call(layer, *shards, params)  # makes the plan
            with no_host_sync():
                context = packed_call(layer, *shards, params)
        else:
            context = layer(*shards, None)
        expected = oracle(query, key, value, lengths, mask_type is AttnMaskType.causal)
        real = shard(torch.ones_like(weight)).bool()
        torch.testing.assert_close(
            context[real].double(), shard(expected)[real], **TOLERANCES[dtype]
        )

        # Each rank's gradient is that of its own queries and of its own shard of keys and values.
        found = torch.autograd.grad((context * shard(weight)).sum(), (query, key, value))
        wanted = torch.autograd.grad((expected * weight).sum(), (query, key, value))
        own = torch.zeros(sum(lengths), dtype=torch.bool, device=Utils.device)
        own[shard(torch.arange(sum(lengths), device=Utils.device))[real[:, 0, 0]]] = True
        for gradient, reference in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient[own], reference[own], **TOLERANCES[dtype])
            assert not gradient[~own].any()
