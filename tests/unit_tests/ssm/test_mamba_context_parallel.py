# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Strides and packed samples that recurrent layers give their kernels."""

from unittest.mock import MagicMock

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.token_order import sample_of_each_token, sample_starts
from megatron.core.token_layout import PaddedLengths, pad_lengths


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


def test_samples_that_cannot_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="total_tokens"):
        sample_of_each_token(packed_of_one(0, 4, 8), tokens=8)
    with pytest.raises(ValueError, match="describes 8 tokens, the Mamba layer has 4"):
        sample_of_each_token(pad_lengths((8,), cp_size=2).packed_seq_params("cpu"), tokens=4)
    assert sample_of_each_token(packed_of_one(0, 8), tokens=8) is None  # one needs no index


def test_a_length_that_only_cp_divides_is_refused():
    """Zigzag order cuts each sample into 2·cp parts; a gated delta net takes no other order."""
    starts = sample_starts(packed_of_one(0, 4, 12), 12, 2, torch.device("cpu"))
    assert starts.tolist() == [0, 4, 12]
    for packed, tokens in ((packed_of_one(0, 6, 12), 12), (None, 6)):
        with pytest.raises(ValueError, match="multiples of 4"):
            sample_starts(packed, tokens, 2, torch.device("cpu"))


def test_runs_with_global_groups_take_what_they_took(monkeypatch):
    """Samples that nothing tells apart, and empty ones."""
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: True)
    assert sample_of_each_token(packed_of_one(0, 4, 8), tokens=8) is None
    packed = PaddedLengths((4, 0, 4), (4, 0, 4)).packed_seq_params("cpu")
    assert sample_starts(packed, 8, 1, torch.device("cpu")).tolist() == [0, 4, 4, 8]
