# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norm with a silu gate, before the output projection of a Mamba-2 layer.

RMSNorm is defined in arXiv 1910.07467, eq. 4. The norm before the output projection, and its
groups, which keep it within one tensor-parallel rank, are in arXiv 2405.21060, sections 7.1 and
8.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Compute `rms(x) * weight * silu(z)`, or `rms(x * silu(z)) * weight` if the gate comes first.

    Args:
        x, z: `[..., D]`. weight: `[D]`.
        group_size: number of features normalised together, a divisor of D; None for all D.

    Returns:
        `[..., D]` in x's dtype; computed in fp32 or wider.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    gate = None if z is None else F.silu(z.to(dtype))
    if gate is not None and not norm_before_gate:
        y = y * gate
    size = group_size or y.shape[-1]
    y = F.rms_norm(y.unflatten(-1, (-1, size)), [size], eps=eps).flatten(-2) * weight.to(dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


class RMSNormGated(torch.nn.Module):
    """Module of `rms_norm_gated` and its weight `[hidden_size]`, made as `mamba_ssm`'s is."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % (group_size or hidden_size):
            raise ValueError(f"group_size {group_size} does not divide hidden_size {hidden_size}")
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Apply the norm to x, gated by z, both `[..., hidden_size]`."""
        return rms_norm_gated(x, self.weight, z, self.eps, self.group_size, self.norm_before_gate)
