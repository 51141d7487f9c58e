# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's state-space duality scan, and the whole layer between its two projections."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .causal_conv1d import causal_conv1d_fn
from .chunked_scan import Enter, chunked_scan


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    enter: Enter | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Chunked scan with the arguments of the `mamba_ssm` kernel of this name, and `enter`.

    Args:
        x: `[B, S, H, P]`; S need not be a multiple of `chunk_size`.
        dt: step sizes, `[B, S, H]`, before `dt_bias [H]` and softplus.
        A: log decay per unit of dt, negative, `[H]`.
        B, C: `[B, S, G, N]`; G divides H, and head h uses group `h // (H / G)`.
        D: skip weight, `[H]` or `[H, P]`.
        z: gate, `[B, S, H, P]`: the output is multiplied by silu(z).
        initial_states: state before the first token, `[B, H, P, N]`; in a packed row it belongs to
            the first sequence.
        seq_idx, enter: as for :func:`chunked_scan`; `enter` has states `[B, H, N, P]`.

    Returns:
        `y [B, S, H, P]` in x's dtype, and with `return_final_states` also the state after the last
        token, `[B, H, P, N]`, in the dtype of the computation (fp32 or wider).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    y, state = chunked_scan(
        C.to(dtype),
        B.to(dtype),
        x.to(dtype) * dt.unsqueeze(-1),
        dt * A.to(dtype),
        chunk_size,
        seq_idx=seq_idx,
        initial_state=None if initial_states is None else initial_states.to(dtype).mT,
        enter=enter,
    )
    if D is not None:
        y = y + (D.unsqueeze(-1) if D.dim() == 1 else D).to(dtype) * x
    if z is not None:
        y = y * F.silu(z.to(dtype))
    y = y.to(x.dtype)
    return (y, state.mT) if return_final_states else y


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
    enter: Enter | None = None,
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
