# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""State-space duality scan of Mamba-2 with the arguments of the `mamba_ssm` kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
