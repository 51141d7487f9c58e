# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Move a bridge's rows along planned routes: one collective forward, one backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.models.mimo.comm.bridge_plan import BridgeRoute


def exchange_rows(
    tensor: Tensor, forward: BridgeRoute, backward: BridgeRoute, group: dist.ProcessGroup
) -> Tensor:
    """Move rows ``[rows held, ...]`` to ``[rows consumed, ...]``, and their gradients back.

    Forward and backward are collectives over ``group`` where their route crosses, for members with
    no rows too: all must run the backward, or none. The routes lie on the tensor's device; nothing
    here waits for it.
    """
    return _ExchangeRows.apply(tensor, forward, backward, group)


def move_rows(tensor: Tensor, route: BridgeRoute, group: dist.ProcessGroup) -> Tensor:
    """Move ``[rows before, ...]`` along ``route`` to ``[route.rows, ...]``, adding up copies.

    Copies are added in the order of CP ranks, so the result does not depend on arrival.
    """
    if not route.crosses:  # its rows lie side by side: all of them, or this rank's slot
        if route.rows == len(tensor):
            return tensor
        return tensor.index_select(0, route.kept_from)
    received = tensor.new_empty((len(route.recv_places), *tensor.shape[1:]))
    dist.all_to_all_single(
        received,
        tensor.index_select(0, route.send_places),
        output_split_sizes=list(route.recv_splits),
        input_split_sizes=list(route.send_splits),
        group=group,
    )
    moved = tensor.new_empty((route.copies * route.rows, *tensor.shape[1:]))
    moved.index_copy_(0, route.recv_places, received)
    moved.index_copy_(0, route.kept_to, tensor.index_select(0, route.kept_from))
    if route.copies == 1:
        return moved
    return moved.view(route.copies, route.rows, *tensor.shape[1:]).sum(0)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, tensor: Tensor, forward: BridgeRoute, backward: BridgeRoute, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.backward_route, ctx.group = backward, group
        return move_rows(tensor, forward, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return move_rows(grad, ctx.backward_route, ctx.group), None, None, None
