# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that the gated delta net imports from `fla`, with the same names and arguments."""

import torch
from torch import Tensor

from .causal_conv1d import causal_conv1d_fn
from .chunked_scan import Enter, chunked_scan, seq_idx_from_cu_seqlens


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_size: int = 64,
    enter: Enter | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Chunked scan with the arguments of the `fla` kernel of this name, and `seq_idx` and `enter`.

    Args:
        q, k: `[B, S, H, K]`. v: `[B, S, H, V]`. g, beta: `[B, S, H]`, beta 0 to 1.
        scale: factor of the output; `K ** -0.5` if None.
        use_qk_l2norm_in_kernel: normalise q and k along K first.
        cu_seqlens: boundaries of a packed batch of one row, `[num_sequences + 1]`, without states.
        g, beta, seq_idx, initial_state, enter: as for :func:`chunked_scan`.

    Returns:
        `o [B, S, H, V]` in v's dtype, and with `output_final_state` the state after the last token,
        `[B, H, K, V]` in the dtype of the computation (fp32 or wider), else None.

    Raises:
        ValueError: `cu_seqlens` comes with states, of which `fla` has one for each sequence; with
            `seq_idx` there is one for each row.
    """
    if cu_seqlens is not None:
        if initial_state is not None or output_final_state:
            raise ValueError("states of packed rows need seq_idx instead of cu_seqlens")
        seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, q.shape[1])
    dtype = torch.promote_types(v.dtype, torch.float32)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.to(dtype)), l2norm(k.to(dtype))
    wide_q, wide_k, values, g, beta = (t.to(dtype) for t in (q, k, v, g, beta))
    o, state = chunked_scan(
        wide_q * (k.shape[-1] ** -0.5 if scale is None else scale),
        wide_k,
        values,
        g,
        chunk_size,
        beta=beta,
        seq_idx=seq_idx,
        initial_state=initial_state,
        enter=enter,
    )
    return o.to(v.dtype), state if output_final_state else None


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """Compute `x / sqrt(sum(x^2) + eps)` along `dim`, in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)


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
