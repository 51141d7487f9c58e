# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over CP ranks against the same layer on whole samples."""

import pytest
import torch

from megatron.core.ssm.state_passing.layer_tokens import LayerTokens
from megatron.core.tensor_parallel import random
from megatron.core.token_layout import PaddedLengths, pad_lengths
from tests.unit_tests.ssm.recurrent_layers import (
    DELTA_NET,
    HIDDEN,
    MAMBA,
    Pair,
    Row,
    random_rows,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, requires_world_size

BATCH = 2
PACKED = {MAMBA: (5, 0, 1, 39, 9), DELTA_NET: (5, 0, 1, 139, 9)}
"""Odd, empty, below 2·cp, and longer than a chunk of the scan and than a shard."""

FP64 = torch.float64
NORM_AGAIN = dict(
    recompute_granularity="selective",
    recompute_modules=["gdn_norm_out"],
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=1,
)


ROWS = [
    Row(2, MAMBA, cp=2),
    Row(2, MAMBA, cp=2, layout="contiguous", dtype=FP64),
    Row(4, MAMBA, cp=3),
    Row(4, MAMBA, cp=4, layout="contiguous"),
    Row(4, MAMBA, cp=4, dtype=FP64),
    Row(4, MAMBA, cp=2, tp=2),
    Row(4, MAMBA, cp=2, tp=2, layout="contiguous"),
    Row(8, MAMBA, cp=5),
    Row(8, MAMBA, cp=8, layout="contiguous", dtype=FP64),
    Row(2, DELTA_NET, cp=2),
    Row(2, DELTA_NET, cp=2, layout="contiguous", dtype=FP64),
    Row(4, DELTA_NET, cp=3, layout="contiguous"),
    Row(4, DELTA_NET, cp=4, dtype=FP64),
    Row(4, DELTA_NET, cp=2, tp=2),
    Row(8, DELTA_NET, cp=5),
    Row(8, DELTA_NET, cp=8, layout="contiguous", dtype=FP64),
    Row(2, DELTA_NET, cp=2, options=NORM_AGAIN),
    Row(2, DELTA_NET, cp=2, layout="contiguous", options=NORM_AGAIN),
]


@pytest.fixture
def pair(request, monkeypatch):
    """The layer over the ranks and on one; None on an idle rank."""

    def copy(output, computed):
        output.untyped_storage().resize_(computed.untyped_storage().nbytes())
        output.untyped_storage().copy_(computed.untyped_storage())

    # Upstream lets tensors share a storage by compiled code, which takes a minute.
    monkeypatch.setattr(random, "_get_share_storage", lambda: copy)
    made = Pair(request.param)
    yield made if made.is_member else None
    made.destroy()


@pytest.fixture
def stays(monkeypatch):
    """Let no layer exchange tokens between layouts."""
    monkeypatch.delattr(LayerTokens, "_route")


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            row,
            id=str(row),
            marks=[requires_world_size(row.world), pytest.mark.shows(row.layer)],
        )
        for row in ROWS
        if not (HAVE_CUDA and row.dtype is FP64)  # GPU kernels have none
    ],
    indirect=True,
)
class TestEqualsOneRank:
    def test_a_plain_batch(self, pair, stays):
        """A rank of two tokens has a convolution that sees three tokens of other ranks."""
        for length in (48 + -48 % (2 * pair.size), 2 * pair.size) if pair else ():
            hidden = random_rows(length, BATCH, HIDDEN, seed=1).to(pair.dtype)
            pair.assert_equal(hidden, PaddedLengths((length,), (length,)), packed=False)

    def test_packed_samples_each_alone(self, pair):
        if pair:
            packed = PACKED[pair.row.layer]
            hidden = random_rows(sum(packed), 1, HIDDEN, seed=1).to(pair.dtype)
            pair.assert_equal(hidden, pad_lengths(packed, pair.size), packed=True)

    def test_packed_samples_of_one_padded_length(self, pair, stays):
        for length in (2, 18 * pair.size) if pair else ():
            lengths = pad_lengths((length, 0, length, length, length - 1), pair.size)
            hidden = random_rows(sum(lengths.real), 1, HIDDEN, seed=1).to(pair.dtype)
            pair.assert_equal(hidden, lengths, packed=True)
