# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Exchange of the tokens before a rank's first one, for a causal convolution over shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.token_layout import Halo


class HaloGather:
    """An all-gather under way of the ranks' last tokens, from which each takes its halo.

    Args:
        x: this rank's tokens, ``[B, S/cp, D]``.
    """

    def __init__(self, x: Tensor, halo: Halo, group: dist.ProcessGroup) -> None:
        self._halo = halo
        own = x[:, x.shape[1] - halo.kept :].transpose(0, 1).contiguous()
        self._gathered, self._work = _all_gather(own, group)

    def wait(self) -> Tensor:
        """Wait for the halo ``[B, reach, D]``, zero where the sample has no such token."""
        self._work.wait()
        rows = self._gathered.index_select(0, self._halo.take)
        if not self._halo.is_whole:
            rows = rows * self._halo.valid[:, None, None].to(rows.dtype)
        return rows.transpose(0, 1)


class HaloGradient:
    """The adjoint of :class:`HaloGather` under way: halo gradients return to the tokens' ranks.

    Args:
        grad: gradient of this rank's halo, ``[B, reach, D]``.
    """

    def __init__(self, grad: Tensor, halo: Halo, group: dist.ProcessGroup) -> None:
        self._halo = halo
        self._gathered, self._work = _all_gather(grad.transpose(0, 1).contiguous(), group)

    def add_to(self, grad: Tensor) -> None:
        """Add gradients from other ranks' halos to the tokens' ``grad [B, S/cp, D]``, in place."""
        self._work.wait()
        halo = self._halo
        rows = self._gathered.index_select(0, halo.used_at).transpose(0, 1)
        grad[:, grad.shape[1] - halo.kept :].index_add_(1, halo.token, rows.to(grad.dtype))


def exchange_halo(x: Tensor, halo: Halo, group: dist.ProcessGroup) -> Tensor:
    """The halo ``[B, reach, D]`` of tokens ``x [B, S/cp, D]``; a collective over ``group``."""
    if halo.is_empty:
        return x.new_zeros(x.shape[0], halo.reach, x.shape[2])
    return _ExchangeHalo.apply(x, halo, group)


class _ExchangeHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, halo, group):
        ctx.halo, ctx.group, ctx.shape = halo, group, x.shape
        return HaloGather(x, halo, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x_grad = grad.new_zeros(ctx.shape)
        HaloGradient(grad, ctx.halo, ctx.group).add_to(x_grad)
        return x_grad, None, None


def _all_gather(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start an all-gather of each rank's ``[n, …]`` into ``[cp · n, …]``."""
    gathered = own.new_empty((group.size() * own.shape[0], *own.shape[1:]))
    return gathered, dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)
