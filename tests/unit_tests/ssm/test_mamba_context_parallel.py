# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens and heads of a Mamba mixer whose heads are spread over CP ranks: order and limits."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.head_parallel_limits import check_gated_delta_net, check_mamba
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.token_order import sample_of_each_token, to_rank_order, to_sequence_order
from megatron.core.token_layout import PaddedLengths, pad_lengths, zigzag_layout
from megatron.core.transformer import TransformerConfig

HIDDEN, HEADS = 32, 24
# Odd, empty, below 2·cp, and longer than a chunk of the scan.
PACKED = (5, 0, 1, 19, 9)


def packed_of_one(*bounds: int) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize(("features", "is_copied"), [(72, False), (68, True)])
def test_kernels_get_a_microbatch_as_it_lies_if_they_take_its_strides(
    features, is_copied, monkeypatch
):
    """Those of causal_conv1d take multiples of 8 alone."""
    given = []

    def kernel(tokens, *_, **__):
        given.append(tokens)
        return tokens

    monkeypatch.setattr(mamba_mixer, "mamba_split_conv1d_scan_combined", kernel)
    mixer = MagicMock(rmsnorm=False, D_has_hdim=False)
    mixer.cp.get_A_log.return_value = torch.zeros(4)
    mixer.cp.get_conv1d_weight.return_value = torch.zeros(2, 1, 4)
    mixer.cp.post_conv_ssm = lambda tokens, _: tokens
    projected = torch.randn(6, 3, features)
    assert torch.equal(MambaMixer._ssm_training(mixer, projected), projected)
    assert (given[0].data_ptr() != projected.data_ptr()) == is_copied
    assert all(stride % 8 == 0 for stride in given[0].stride()[:2]) != is_copied


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
class TestTokenOrder:
    def test_packed_samples_come_into_sequence_order_and_back(self, cp_size):
        lengths = pad_lengths(PACKED, cp_size)
        params = lengths.packed_seq_params("cpu")
        ranks = zigzag_layout(lengths, cp_size).tokens.view(-1, 1).float()
        stream = torch.arange(lengths.total).view(-1, 1).float()
        assert torch.equal(to_sequence_order(ranks, cp_size, params), stream)
        assert torch.equal(to_rank_order(stream, cp_size, params), ranks)

    def test_lengths_that_do_not_halve_and_boundaries_of_one_rank_are_refused(self, cp_size):
        """cp divides the first length: ranks have equally many tokens, nothing else notices."""
        packed = PaddedLengths(PACKED, PACKED).packed_seq_params("cpu")
        for tokens, params in ((5 * cp_size, None), (sum(PACKED), packed)):
            with pytest.raises(ValueError, match=f"multiples of {2 * cp_size}"):
                to_sequence_order(torch.zeros(tokens, 1), cp_size, params)
        params = pad_lengths((48,), cp_size).packed_seq_params("cpu")
        with pytest.raises(ValueError, match=f"end at 48.*match the {48 * cp_size} tokens"):
            to_sequence_order(torch.zeros(48 * cp_size, 1), cp_size, params)


def test_samples_that_cannot_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="total_tokens"):
        sample_of_each_token(packed_of_one(0, 4, 8), tokens=8)
    with pytest.raises(ValueError, match="describes 8 tokens, the Mamba layer has 4"):
        sample_of_each_token(pad_lengths((8,), cp_size=2).packed_seq_params("cpu"), tokens=4)
    assert sample_of_each_token(packed_of_one(0, 8), tokens=8) is None  # one needs no index


class TestLimits:
    @pytest.mark.parametrize(
        "check, sizes, message",
        [
            (
                check_mamba, (64, 8, 2, 64),
                "a Mamba layer of 64 heads in 8 groups cannot be spread over tp=2, cp=64: "
                "tp·cp = 128 must divide the heads; "
                "cp sizes that fit with tp=2: 1, 2, 4, 8, 16, 32; state passing takes any",
            ),
            (
                check_mamba, (12, 4, 1, 3),
                "a Mamba layer of 12 heads in 4 groups cannot be spread over tp=1, cp=3: one of cp "
                "and the 4 groups of a TP rank must divide the other; "
                "cp sizes that fit with tp=1: 1, 2, 4, 12; state passing takes any",
            ),
            (
                check_mamba, (12, 4, 3, 1),
                "a Mamba layer of 12 heads in 4 groups cannot be spread over tp=3, cp=1: "
                "tp = 3 must divide the groups; cp sizes that fit with tp=3: none",
            ),
            (
                check_gated_delta_net, (16, 32, 2, 3),
                "a gated delta net of 16 key and 32 value heads cannot be spread over tp=2, cp=3: "
                "tp·cp = 6 must divide both; cp sizes that fit with tp=2: 1, 2, 4, 8; "
                "state passing takes any",
            ),
        ],
        ids=["heads", "groups", "groups-tp", "delta"],
    )  # fmt: skip
    def test_the_refusal_names_numbers_rule_and_sizes(self, check, sizes, message):
        with pytest.raises(ValueError) as refusal:
            check(*sizes)
        assert str(refusal.value) == message

    @pytest.mark.parametrize("cp, groups", [(5, 1), (3, 4)])
    def test_the_mixer_refuses_before_it_builds_anything(self, cp, groups):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            mamba_num_heads=HEADS,
            mamba_head_dim=8,
            mamba_num_groups=groups,
        )
        submodules = MambaMixerSubmodules(in_proj=None, out_proj=None)
        tp, cp = (SimpleNamespace(size=lambda size=size: size) for size in (1, cp))
        with pytest.raises(ValueError, match="cp sizes that fit"):
            MambaMixer(config, submodules, HIDDEN, pg_collection=SimpleNamespace(tp=tp, cp=cp))
