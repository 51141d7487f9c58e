# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sequence-mixing kernels in plain PyTorch: chunked, vectorised, differentiable by autograd.

They run wherever PyTorch runs, and take the arguments of the GPU kernels of `mamba_ssm`,
`causal_conv1d` and `fla`. They serve to train without those packages, and as an oracle for the GPU
kernels.
"""

from .causal_conv1d import causal_conv1d_fn
from .chunked_scan import seq_idx_from_cu_seqlens
from .gated_delta_rule import chunk_gated_delta_rule
from .gated_rmsnorm import RMSNormGated
from .ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

__all__ = [
    "RMSNormGated",
    "causal_conv1d_fn",
    "chunk_gated_delta_rule",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "seq_idx_from_cu_seqlens",
]
