# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parts that chunked scans share: decays between tokens, and sequences of a packed row.

Below, `ids [B, c, Q]` is the sequence index of each token of c chunks of Q tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_tokens(t: Tensor, padding: int) -> Tensor:
    """Appends zero tokens to `[B, S, ...]`."""
    return F.pad(t, (0, 0) * (t.dim() - 2) + (0, padding)) if padding else t


def seq_idx_from_cu_seqlens(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """Sequence index of each token of one packed row.

    Args:
        cu_seqlens: start of each sequence, then the end of the last one, `[num_sequences + 1]`.
        total_tokens: length of the row; tokens past `cu_seqlens[-1]` (padding) form one more
            sequence.

    Returns:
        `[1, total_tokens]` int32. Empty sequences use up an index.
    """
    tokens = torch.arange(total_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(tokens, cu_seqlens[1:], right=True, out_int32=True).unsqueeze(0)


def chunk_ids(seq_idx: Tensor, size: int) -> Tensor:
    """Cut `seq_idx [B, S]` into chunks `[B, c, Q]`; padding belongs to the last sequence."""
    padding = -seq_idx.shape[1] % size
    seq_idx = torch.cat([seq_idx, seq_idx[:, -1:].expand(-1, padding)], dim=1)
    return seq_idx.view(seq_idx.shape[0], -1, size)


def state_ids(ids: Tensor) -> Tensor:
    """Sequence that the state at each of the c + 1 chunk boundaries belongs to, `[B, c + 1]`."""
    return torch.cat([ids[:, 0, :1], ids[:, :, -1]], dim=1)


def sees(ids: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Whether token i sees token j <= i: `[Q, Q]`, or `[..., Q, Q]` for `ids [..., Q]`."""
    visible = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if ids is not None:
        visible = visible & (ids.unsqueeze(-1) == ids.unsqueeze(-2))
    return visible


def pairwise_decay(running_sum: Tensor) -> Tensor:
    """Compute `exp(s_i - s_j)`, `[..., Q, Q]`, of `s [..., Q]`; the caller masks out j > i."""
    return _BoundedExp.apply(running_sum.unsqueeze(-1) - running_sum.unsqueeze(-2))


class _BoundedExp(torch.autograd.Function):
    """exp clamped to at most 1, so that the masked half does not overflow, and to well above the
    smallest normal number, as CPUs are many times slower below it.

    The gradient ignores the clamp: where the upper bound acts it is masked, and where the lower
    bound acts it is lost in rounding. This saves four passes over the largest tensor of a scan.
    """

    @staticmethod
    def forward(ctx, gap: Tensor) -> Tensor:
        decay = gap.clamp(0.7 * math.log(torch.finfo(gap.dtype).tiny), 0).exp_()
        ctx.save_for_backward(decay)
        return decay

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (decay,) = ctx.saved_tensors
        return grad * decay
