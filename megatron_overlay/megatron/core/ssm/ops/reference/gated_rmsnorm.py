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


class RMSNormGated(torch.nn.Module):
    """`rms(x) · weight · silu(z)`, or `rms(x · silu(z)) · weight` if the gate comes first.

    Args:
        group_size: features normalised together, a divisor of `hidden_size`; None for all.
    """

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
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return `[..., hidden_size]` in the dtype of x, computed in fp32 or wider; z as x."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        gate = 1 if z is None else F.silu(z.to(dtype))
        y = x.to(dtype) if self.norm_before_gate else x.to(dtype) * gate
        groups = y.unflatten(-1, (-1, self.group_size))
        y = F.rms_norm(groups, [self.group_size], eps=self.eps).flatten(-2)
        y = y * self.weight.to(dtype)
        return (y * gate if self.norm_before_gate else y).to(x.dtype)
