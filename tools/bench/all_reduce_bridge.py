# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the exact exchange is measured against: all-reduce of zero-padded gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.models.mimo.comm.bridge_topology import BridgeDirection, BridgeTopology
from megatron.core.models.mimo.comm.colocated_communicator import ColocatedBridgeCommunicator


class AllReduceBridge:
    """Same result as ``bridge`` for equal samples, with a plain collective for each need.

    Every pipeline stage receives the embeddings; ranks that don't consume a row feed zeros into the
    backward. The destination grid has its ``cp`` and ``pp`` groups where these sizes exceed 1.

    Args:
        bridge: the bridge to mirror; its gather groups are used.
    """

    def __init__(self, bridge: ColocatedBridgeCommunicator) -> None:
        topology, grid = bridge.topology, bridge.dest_grid
        sizes = {"cp": topology.dest_cp, "pp": topology.dest_pp}
        self.bridge = bridge
        self.sum_groups = [grid.get_pg(dim) for dim, size in sizes.items() if size > 1]

    def communicate(self, tensor: Tensor) -> Tensor:
        """Move ``[rows produced, ...]`` to ``[rows consumed, ...]``."""
        return _AllReduceBridge.apply(tensor, self)

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather the slots' rows ``[n, ...]`` to ``[scale * n, ...]``."""
        out = tensor.new_empty((self.bridge.scale * tensor.size(0), *tensor.shape[1:]))
        dist.all_gather_into_tensor(out, tensor.contiguous(), group=self.bridge.gather_pg)
        return out

    def narrow(self, tensor: Tensor) -> Tensor:
        """This rank's slot of ``[scale * n, ...]``."""
        part = self.bridge.get_slice_info(tensor.size(0))
        return tensor.narrow(0, part.start, part.size).contiguous()


def rows_received(topology: BridgeTopology, rows: int) -> tuple[float, float]:
    """Rows that each rank receives forward and backward, for ``rows`` of its block.

    An all-gather over k ranks brings (k-1)/k of its result, a ring all-reduce 2(n-1)/n of it.
    """
    gathered = (topology.scale - 1) / topology.scale * rows
    fan_in = topology.direction is BridgeDirection.FAN_IN
    fan_out = topology.direction is BridgeDirection.FAN_OUT
    consumed = rows / topology.scale if fan_out else rows
    sizes = (topology.dest_cp, topology.dest_pp)
    summed = sum(2 * (size - 1) / size * consumed for size in sizes)
    return gathered * fan_in, summed + gathered * fan_out


class _AllReduceBridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, plain: AllReduceBridge) -> Tensor:
        ctx.plain = plain
        if plain.bridge.is_fan_in():
            return plain.gather(tensor)
        return plain.narrow(tensor) if plain.bridge.is_fan_out() else tensor

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        plain = ctx.plain
        grad = grad.clone(memory_format=torch.contiguous_format)
        for group in plain.sum_groups:
            dist.all_reduce(grad, group=group)
        if plain.bridge.is_fan_in():
            return plain.narrow(grad), None
        return plain.gather(grad) if plain.bridge.is_fan_out() else grad, None
