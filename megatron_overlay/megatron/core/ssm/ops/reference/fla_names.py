# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that the gated delta net imports from `fla`, with the same names and arguments."""

from torch import Tensor

from .causal_conv1d import causal_conv1d_fn
from .chunked_scan import seq_idx_from_cu_seqlens
from .gated_delta_rule import chunk_gated_delta_rule, l2norm

__all__ = ["causal_conv1d", "chunk_gated_delta_rule", "l2norm"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Depthwise causal convolution of `x [B, S, D]` with `weight [D, W]`, without states."""
    seq_idx = None if cu_seqlens is None else seq_idx_from_cu_seqlens(cu_seqlens, x.shape[1])
    y = causal_conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx, activation=activation)
    return y.transpose(1, 2), None
