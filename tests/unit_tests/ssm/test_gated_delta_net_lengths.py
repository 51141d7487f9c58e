# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Lengths that a head-parallel gated delta net takes."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet


class _Projected(Exception):
    """The layer has accepted the lengths."""


def forward(lengths: list[int], cp_size: int) -> None:
    """Begin a layer's forward on a plain sample, or on packed samples, of these lengths."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    def project(_):
        raise _Projected

    layer = SimpleNamespace(
        layer_tokens=None,
        sp_size=1,
        cp_size=cp_size,
        config=SimpleNamespace(deterministic_mode=False),
        in_proj=project,
        _resolve_cu_seqlens=lambda *a, **k: GatedDeltaNet._resolve_cu_seqlens(layer, *a, **k),
    )
    rows = torch.zeros(sum(lengths) // cp_size, 1, 4)
    packed = packed if len(lengths) > 1 else None
    GatedDeltaNet.forward(layer, rows, None, packed_seq_params=packed)


def test_lengths_that_zigzag_order_halves_are_taken():
    with pytest.raises(_Projected):
        forward([4, 8], cp_size=2)


@pytest.mark.parametrize("lengths", [[6], [6, 6]])
def test_a_length_that_only_cp_divides_is_refused(lengths):
    """Zigzag order cuts each sample into 2·cp parts."""
    with pytest.raises(ValueError, match="multiples of 4"):
        forward(lengths, cp_size=2)
