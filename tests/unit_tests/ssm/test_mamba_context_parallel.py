# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens and heads of a Mamba mixer whose heads are spread over CP ranks: order and limits."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.head_parallel_limits import check_mamba
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.token_order import sample_of_each_token, to_rank_order, to_sequence_order
from megatron.core.token_layout import PaddedLengths, pad_lengths, zigzag_layout
from megatron.core.transformer import TransformerConfig

HIDDEN, HEADS = 32, 24
# Odd, empty, below 2·cp, and longer than a chunk of the scan.
PACKED = (5, 0, 1, 19, 9)


def zigzag_and_stream(lengths: PaddedLengths, cp_size: int) -> tuple[Tensor, Tensor]:
    """Token numbers in rank order and in sequence order, one feature a token."""
    tokens = zigzag_layout(lengths, cp_size).tokens.flatten()
    return tokens.unsqueeze(1).float(), torch.arange(lengths.total).unsqueeze(1).float()


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
class TestTokenOrder:
    def test_packed_samples_come_into_sequence_order_and_back(self, cp_size):
        lengths = pad_lengths(PACKED, cp_size)
        params = lengths.packed_seq_params("cpu")
        ranks, stream = zigzag_and_stream(lengths, cp_size)
        assert torch.equal(to_sequence_order(ranks, cp_size, params), stream)
        assert torch.equal(to_rank_order(stream, cp_size, params), ranks)

    def test_a_length_that_does_not_halve_is_refused(self, cp_size):
        """cp divides the length, so ranks have equally many tokens and nothing else notices."""
        with pytest.raises(ValueError, match=f"multiples of {2 * cp_size}"):
            to_sequence_order(torch.zeros(5 * cp_size, 1), cp_size)

    def test_unpadded_odd_samples_are_refused(self, cp_size):
        params = PaddedLengths(PACKED, PACKED).packed_seq_params("cpu")
        with pytest.raises(ValueError, match=f"multiples of {2 * cp_size}"):
            to_sequence_order(torch.zeros(sum(PACKED), 1), cp_size, params)

    def test_boundaries_of_one_rank_are_refused(self, cp_size):
        params = pad_lengths((48,), cp_size).packed_seq_params("cpu")
        with pytest.raises(ValueError, match=f"end at 48.*match the {48 * cp_size} tokens"):
            to_sequence_order(torch.zeros(48 * cp_size, 1), cp_size, params)


class TestSampleOfEachToken:
    def test_samples_that_cannot_be_told_apart_are_refused(self):
        cu_seqlens = torch.tensor([0, 4, 8], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens)
        with pytest.raises(ValueError, match="total_tokens"):
            sample_of_each_token(params, tokens=8)

    def test_one_sample_needs_no_index(self):
        cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens)
        assert sample_of_each_token(params, tokens=8) is None

    def test_another_number_of_tokens_is_refused(self):
        params = pad_lengths((8,), cp_size=2).packed_seq_params("cpu")
        with pytest.raises(ValueError, match="describes 8 tokens, the Mamba layer has 4"):
            sample_of_each_token(params, tokens=4)


class TestLimits:
    @pytest.mark.parametrize(
        "heads, groups, tp, cp, message",
        [
            (
                64, 8, 2, 64,
                "a Mamba layer of 64 heads in 8 groups cannot be spread over tp=2, cp=64: "
                "tp·cp = 128 must divide the heads; "
                "cp sizes that fit with tp=2: 1, 2, 4, 8, 16, 32; state passing takes any",
            ),
            (
                12, 4, 1, 3,
                "a Mamba layer of 12 heads in 4 groups cannot be spread over tp=1, cp=3: one of cp "
                "and the 4 groups of a TP rank must divide the other; "
                "cp sizes that fit with tp=1: 1, 2, 4, 12; state passing takes any",
            ),
            (
                12, 4, 3, 1,
                "a Mamba layer of 12 heads in 4 groups cannot be spread over tp=3, cp=1: "
                "tp = 3 must divide the groups; cp sizes that fit with tp=3: none",
            ),
        ],
        ids=["heads", "groups", "groups-tp"],
    )  # fmt: skip
    def test_the_refusal_names_numbers_rule_and_sizes(self, heads, groups, tp, cp, message):
        with pytest.raises(ValueError) as refusal:
            check_mamba(heads, groups, tp, cp)
        assert str(refusal.value) == message

    @pytest.mark.parametrize("cp, groups", [(5, 1), (3, 4)])
    def test_the_mixer_refuses_before_it_builds_anything(self, cp, groups):
        def must_not_be_built(*args, **kwargs):
            raise AssertionError("a layer was built")

        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            mamba_num_heads=HEADS,
            mamba_head_dim=8,
            mamba_num_groups=groups,
        )
        submodules = MambaMixerSubmodules(in_proj=must_not_be_built, out_proj=must_not_be_built)
        tp, cp = (SimpleNamespace(size=lambda size=size: size) for size in (1, cp))
        with pytest.raises(ValueError, match="cp sizes that fit"):
            MambaMixer(config, submodules, HIDDEN, pg_collection=SimpleNamespace(tp=tp, cp=cp))
