# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples that recurrent layers cannot tell apart, and those that kernels are told of."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.token_order import sample_of_each_token, sample_starts
from megatron.core.token_layout import PaddedLengths, pad_lengths


def packed_of_one(*bounds: int) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))


def test_samples_that_cannot_be_told_apart_are_refused(monkeypatch):
    """Runs with global groups take them, as upstream's do."""
    with pytest.raises(ValueError, match="total_tokens"):
        sample_of_each_token(packed_of_one(0, 4, 8), tokens=8)
    with pytest.raises(ValueError, match="describes 8 tokens, the Mamba layer has 4"):
        sample_of_each_token(pad_lengths((8,), cp_size=2).packed_seq_params("cpu"), tokens=4)
    assert sample_of_each_token(packed_of_one(0, 8), tokens=8) is None  # one needs no index
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: True)
    assert sample_of_each_token(packed_of_one(0, 4, 8), tokens=8) is None


def test_kernels_are_told_of_no_empty_sample():
    """fla's kernels count samples by their first chunks, and empty samples have none."""
    packed = PaddedLengths((0, 2, 0, 4, 0), (0, 2, 0, 4, 0)).packed_seq_params("cpu")
    assert sample_starts(packed, 6, 1, torch.device("cpu")).tolist() == [0, 2, 6]
