# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 layer between its two projections: convolution, scan and gate."""

from collections.abc import Callable

from torch import Tensor

from .causal_conv1d import causal_conv1d_fn
from .ssd import mamba_chunk_scan_combined


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    seq_idx: Tensor | None = None,
    activation: str | None = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    conv_initial_states: Tensor | None = None,
    enter: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute what the fused `mamba_ssm` kernel of this name computes without a fused norm.

    Args:
        zxbcdt: input projection `[B, S, 2 * H * P + 2 * G * N + H]`: gate z; then x, B and C, which
            are convolved together; then dt.
        conv1d_weight: `[H * P + 2 * G * N, W]`. conv1d_bias: `[H * P + 2 * G * N]`.
        dt_bias, A: `[H]`. D: `[H]` (then `headdim` is P) or `[H, P]`.
        norm_before_gate: accepted as by the kernel; has no effect without a fused norm.
        conv_initial_states: convolution inputs before the first token,
            `[B, H * P + 2 * G * N, W - 1]`; not an argument of the kernel.
        enter: as for `mamba_chunk_scan_combined`; not an argument of the kernel.

    Returns:
        `[B, S, H * P]`.
    """
    heads = D.shape[0]
    headdim = D.shape[1] if headdim is None else headdim
    inner = heads * headdim
    z, xBC, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    xBC = causal_conv1d_fn(
        xBC.transpose(1, 2),
        conv1d_weight,
        conv1d_bias,
        seq_idx,
        initial_states=conv_initial_states,
        activation=activation,
    ).transpose(1, 2)
    state_width = (xBC.shape[-1] - inner) // 2
    x, B, C = xBC.split([inner, state_width, state_width], dim=-1)
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, headdim)),
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        dt_softplus=True,
        enter=enter,
    )
    return y.flatten(-2)
