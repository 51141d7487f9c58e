# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives over shards, each driven by a precomputed plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from megatron.core.token_layout.layouts import TokenLayout
from megatron.core.token_layout.route import Route


def exchange(
    tensor: Tensor,
    route: Route,
    group: dist.ProcessGroup,
    adjoint: Route | None = None,
    name: str = "token exchange",
) -> Tensor:
    """Move rows ``[n, ...]`` along ``route`` to ``[route.size, ...]``, and their gradient back.

    Collective over ``group``, including ranks without a row, unless the route is local. So is the
    backward, which either all ranks run or none. Routes lie on the tensor's device; nothing here
    waits for the device. Addends of a row are summed in a fixed order, not as they arrive.

    Args:
        adjoint: route of the gradient. The default is ``route`` reversed, which restores every bit.
        name: name of the exchange and of its backward in a profiler's trace.
    """
    return _Exchange.apply(tensor, route, adjoint or route.reversed(), group, name)


def gather_tokens(tensor: Tensor, layout: TokenLayout, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards ``[total/cp, ...]`` into global token order ``[total, ...]``.

    The backward is the adjoint, a reduce-scatter: each rank receives the sum, over ``group``, of
    the gradients with respect to its own tokens. ``layout`` lies on the tensor's device.
    """
    return _GatherTokens.apply(tensor, layout, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, tensor: Tensor, route: Route, adjoint: Route, group: dist.ProcessGroup, name: str
    ) -> Tensor:
        ctx.adjoint, ctx.group, ctx.name = adjoint, group, name
        with record_function(name):
            return _move(tensor, route, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        with record_function(ctx.name):
            return _move(grad, ctx.adjoint, ctx.group), None, None, None, None


class Moving:
    """An exchange under way, with its buffers; construction starts it. Not differentiable.

    Args:
        tensor, route, group: as in :func:`exchange`.
        overlap: return without waiting for the other ranks' rows.
    """

    def __init__(
        self, tensor: Tensor, route: Route, group: dist.ProcessGroup, overlap: bool = True
    ) -> None:
        self._tensor, self._route, self._work = tensor, route, None
        if not route.is_local:
            self._received = tensor.new_empty((len(route.recv_places), *tensor.shape[1:]))
            self._sent = tensor.index_select(0, route.send_places)
            self._work = dist.all_to_all_single(
                self._received,
                self._sent,
                output_split_sizes=list(route.recv_splits),
                input_split_sizes=list(route.send_splits),
                group=group,
                async_op=overlap,
            )

    def finish(self) -> Tensor:
        """Wait for the rows, on a GPU only in its stream, and return ``[route.size, ...]``."""
        tensor, route = self._tensor, self._route
        if self._work is not None:
            self._work.wait()
        places = route.addends * route.size
        is_full = len(route.kept_to) + len(route.recv_places) == places
        new = tensor.new_empty if is_full else tensor.new_zeros
        moved = new((places, *tensor.shape[1:]))
        if not route.is_local:
            moved.index_copy_(0, route.recv_places, self._received)
        moved.index_copy_(0, route.kept_to, tensor.index_select(0, route.kept_from))
        if route.addends == 1:
            return moved
        return moved.view(route.addends, route.size, *tensor.shape[1:]).sum(0)


def _move(tensor: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
    return Moving(tensor, route, group, overlap=False).finish()


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, layout: TokenLayout, group: dist.ProcessGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        gathered = tensor.new_empty((layout.lengths.total, *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        return gathered.index_select(0, layout.places)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        layout = ctx.layout
        shard = grad.new_empty((layout.shard_size, *grad.shape[1:]))
        by_rank = grad.index_select(0, layout.tokens.flatten())
        dist.reduce_scatter_tensor(shard, by_rank, group=ctx.group)
        return shard, None, None
