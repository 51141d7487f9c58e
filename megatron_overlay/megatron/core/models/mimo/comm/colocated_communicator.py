# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge between two modules on the same ranks that have different parallel layouts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.bridge_exchange import exchange_rows
from megatron.core.models.mimo.comm.bridge_plan import BridgeRoute, plan_block
from megatron.core.models.mimo.comm.bridge_topology import BridgeDirection, bridge_topology
from megatron.core.utils import log_single_rank

__all__ = ["BridgeDirection", "ColocatedBridgeCommunicator", "SliceInfo"]

logger = logging.getLogger(__name__)


@dataclass
class SliceInfo:
    """A rank's part of the batch dim: ``size`` entries from ``start``."""

    start: int
    size: int


class ColocatedBridgeCommunicator:
    """Hands a source module's output to a destination module, and its gradient back.

    The source has TP and DP, the destination TP, CP, PP and DP. Forward, every rank of the
    destination's first stage ends with all rows of its DP index, its CP siblings with the same;
    later stages end with an empty tensor. Backward, each source rank receives the true gradient of
    the rows that it produced: summed over CP siblings, taken once from the TP replicas. Each rank
    receives only rows that it needs and does not have.

    The source's output must be the same on all its TP ranks. Construction is collective over the
    world.

    Args:
        src_grid: factorization of the ranks for the source; CP and PP 1.
        dest_grid: factorization of the same ranks for the destination.
        src_module_name, dest_module_name: for messages.
        dim_mapping: which tensor dim is ``b``, the batch. The default is ``[b, s, h]``;
            ``{'b': 0, 'h': 1}`` is for flat embeddings, whose rows are the samples' tokens one
            after the other.

    Attributes:
        rank_to_src_pos: (dp, tp) of each global rank.
        rank_to_dest_pos: (dp, tp) of the ranks with cp=0 and pp=0.
        rank_to_dest_coords: (dp, tp, cp) of the ranks with pp=0.
        direction, scale: which side has more DP ranks, and how many times more.
        gather_group_ranks: ranks that hold one slot each of a coarser DP index's batch.

    Raises:
        ValueError: the grids don't allow a bridge; see :func:`bridge_topology`.
    """

    def __init__(
        self,
        src_grid: HyperCommGrid,
        dest_grid: HyperCommGrid,
        src_module_name: str = "src",
        dest_module_name: str = "dest",
        dim_mapping: dict[str, int] | None = None,
    ) -> None:
        self.topology = bridge_topology(src_grid, dest_grid)
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name, self.dest_module_name = src_module_name, dest_module_name
        self.dim_mapping = dim_mapping or {"b": 0, "s": 1, "h": 2}
        self.current_rank = dist.get_rank()

        dest = self.topology.dest
        self.rank_to_src_pos = {r: (at.dp, at.tp) for r, at in self.topology.src.items()}
        self.rank_to_dest_pos = {r: (at.dp, at.tp) for r, at in dest.items() if at.cp == at.pp == 0}
        self.rank_to_dest_coords = {
            r: (at.dp, at.tp, at.cp) for r, at in dest.items() if at.pp == 0
        }
        self.direction, self.scale = self.topology.direction, self.topology.scale
        self.gather_group_ranks = self.topology.gather_groups

        self.block_pg = self._block_group() if self.topology.exchanges else None
        if self.block_pg is not None:
            members = dist.get_process_group_ranks(self.block_pg)
            self._plan = plan_block(self.topology, members)
            self._member = members.index(self.current_rank)
        self.gather_pg = None
        if self.gather_group_ranks:
            self.gather_pg, _ = dist.new_subgroups_by_enumeration(
                self.gather_group_ranks, backend=dest_grid.backend
            )
        log_single_rank(
            logger,
            logging.INFO,
            f"bridge {src_module_name} {dict(zip(src_grid.dim_names, src_grid.shape, strict=True))}"
            f" -> {dest_module_name} "
            f"{dict(zip(dest_grid.dim_names, dest_grid.shape, strict=True))}: "
            f"{self.direction.value}, scale {self.scale}",
        )

    def is_fan_in(self) -> bool:
        """Whether the source has more DP ranks."""
        return self.direction is BridgeDirection.FAN_IN

    def is_fan_out(self) -> bool:
        """Whether the destination has more DP ranks."""
        return self.direction is BridgeDirection.FAN_OUT

    def get_slice_info(self, batch_size: int) -> SliceInfo:
        """This rank's slot of a coarser DP index's batch of ``batch_size`` equal entries.

        Fan-out: what it consumes of the source's batch. Fan-in: what it produced of the
        destination's. Equal: all of it. CP siblings and pipeline stages have the same.

        Raises:
            ValueError: ``scale`` does not divide ``batch_size``.
        """
        self._check_divisible(batch_size, "rows")
        size = batch_size // self.scale
        return SliceInfo(start=self.topology.slot(self.current_rank) * size, size=size)

    def communicate(
        self,
        tensor: Tensor,
        rows_per_sample: Sequence[int] | None = None,
        row_owner: Tensor | None = None,
    ) -> Tensor:
        """Hand rows over: :meth:`plan_routes` and :meth:`exchange` in one call.

        Arguments, and what is raised, are theirs.
        """
        num_rows = tensor.size(self.dim_mapping["b"])
        return self.exchange(
            tensor, self.plan_routes(num_rows, rows_per_sample, row_owner, tensor.device)
        )

    def row_counts(self, produced: int, consumed: Tensor) -> list[int] | None:
        """``rows_per_sample`` for a batch whose slots differ in rows, which no rank knows alone.

        With fan-out it is collective over ``gather_pg`` and waits for the device.

        Args:
            produced: rows that this rank has as a source.
            consumed: rows that it ends with as a destination; int64 scalar.
        """
        if self.is_fan_in():
            return [produced]
        if self.is_fan_out():
            return self._gather_slots(consumed.view(1), consumed.device).flatten().tolist()
        return None

    def plan_routes(
        self,
        num_rows: int,
        rows_per_sample: Sequence[int] | None,
        row_owner: Tensor | None,
        device: torch.device,
    ) -> tuple[BridgeRoute, BridgeRoute] | None:
        """Plan a batch's way over the bridge and back, on the host.

        It may run before the source's layers do. With ``rows_per_sample`` (fan-in) or ``row_owner``
        (fan-out, CP>1) it is collective over ``gather_pg`` and waits for the device; all ranks pass
        the same arguments of the two or leave the same ones out.

        Args:
            num_rows: entries in the batch dim of the source's tensor on this rank; may be 0.
            rows_per_sample: how many of them each of its samples has. ``None``: samples are equal.
            row_owner: int [rows of this rank's destination batch], which destination CP rank
                consumes each row: elsewhere its gradient is zero and is not moved. The same on all
                ranks of a destination DP index, pipeline stages included. ``None``: the gradients
                of all CP ranks are moved and added up.
            device: of the tensor.

        Returns:
            Forward and backward route; ``None`` where no rank ever takes from another.

        Raises:
            ValueError: the counts don't add up, or fan-out does not divide the samples.
        """
        if self.block_pg is None:
            return None
        slot_rows = self._slot_rows(num_rows, rows_per_sample, device)
        owner = None
        if row_owner is not None and self.topology.dest_cp > 1:
            owner = self._block_owner(row_owner.cpu().long(), slot_rows, device)
        forward = self._plan.forward.route(self._member, slot_rows)
        backward = self._plan.backward.route(self._member, slot_rows, owner)
        return forward.to(device), backward.to(device)

    def exchange(self, tensor: Tensor, routes: tuple[BridgeRoute, BridgeRoute] | None) -> Tensor:
        """Move rows along the routes that :meth:`plan_routes` made for them; differentiable.

        Collective over the ranks of a block, in the backward too: all of them, those with no row
        among them, pass a tensor that requires grad (or none does) and run the backward (or none
        does). ``[..., rows produced, ...]`` becomes ``[..., rows consumed, ...]`` along the batch
        dim, which has 0 rows on later pipeline stages.
        """
        if routes is None:
            return tensor.contiguous()
        batch_dim = self.dim_mapping["b"]
        moved = exchange_rows(tensor.movedim(batch_dim, 0), *routes, self.block_pg)
        return moved.movedim(0, batch_dim).contiguous()

    def destroy(self) -> None:
        """Free the group that this bridge made; groups of the grids stay theirs."""
        if self.gather_pg is not None:
            dist.destroy_process_group(self.gather_pg)
            self.gather_pg = None

    def _block_group(self) -> dist.ProcessGroup | None:
        """The grid's group of this rank's block: dims of size 1 are left out to meet existing ones.

        With fan-out and equal DP a block is a source TP group.
        """
        if not self.is_fan_in():
            return _get_or_create(self.src_grid, ["tp"])
        sizes = dict(zip(self.dest_grid.dim_names, self.dest_grid.shape, strict=True))
        dims = [dim for dim in ("tp", "cp", "pp") if sizes.get(dim, 1) > 1]
        return _get_or_create(self.dest_grid, dims)

    def _slot_rows(
        self, num_rows: int, rows_per_sample: Sequence[int] | None, device: torch.device
    ) -> list[int]:
        """Rows of each slot of this rank's block."""
        if rows_per_sample is not None and sum(rows_per_sample) != num_rows:
            raise ValueError(
                f"rows_per_sample adds up to {sum(rows_per_sample)}, but {self.src_module_name} "
                f"has {num_rows} rows"
            )
        if self.is_fan_in():
            if rows_per_sample is None:
                return [num_rows] * self.scale
            return self._gather_slots(torch.tensor([num_rows]), device).flatten().tolist()
        if rows_per_sample is None:
            self._check_divisible(num_rows, "rows")
            return [num_rows // self.scale] * self.scale
        self._check_divisible(len(rows_per_sample), "samples")
        per_slot = len(rows_per_sample) // self.scale
        return [
            sum(rows_per_sample[slot * per_slot : (slot + 1) * per_slot])
            for slot in range(self.scale)
        ]

    def _block_owner(self, own: Tensor, slot_rows: list[int], device: torch.device) -> Tensor:
        """CP owner of every row of the block; with fan-out, other ranks know the other slots'."""
        slot = self.topology.slot(self.current_rank)
        expected = slot_rows[slot] if self.is_fan_out() else sum(slot_rows)
        cp = self.topology.dest_cp
        if own.shape != (expected,) or ((own < 0) | (own >= cp)).any():
            raise ValueError(
                f"row_owner must give a CP rank below {cp} for each of the {expected} rows that "
                f"{self.dest_module_name} consumes here, got shape {tuple(own.shape)}"
                + (f" with values {int(own.min())}…{int(own.max())}" if own.numel() else "")
            )
        if not self.is_fan_out() or max(slot_rows) == 0:
            return own
        padded = own.new_zeros(max(slot_rows))
        padded[:expected] = own
        by_slot = self._gather_slots(padded, device)
        return torch.cat([row[:n] for row, n in zip(by_slot, slot_rows, strict=True)])

    def _gather_slots(self, values: Tensor, device: torch.device) -> Tensor:
        """Every slot's ``values`` [n], as [scale, n] on the host."""
        gathered = torch.empty(self.scale * len(values), dtype=values.dtype, device=device)
        dist.all_gather_into_tensor(gathered, values.to(device), group=self.gather_pg)
        ranks = dist.get_process_group_ranks(self.gather_pg)
        by_slot = sorted(range(self.scale), key=lambda i: self.topology.slot(ranks[i]))
        return gathered.cpu().view(self.scale, -1)[by_slot]

    def _check_divisible(self, count: int, what: str) -> None:
        if count % self.scale:
            raise ValueError(
                f"{count} {what} are not divisible by {self.direction.value} scale={self.scale}"
            )


def _get_or_create(grid: HyperCommGrid, dims: list[str]) -> dist.ProcessGroup | None:
    return grid.get_pg(dims) if grid.has_pg(dims) else grid.create_pg(dims)
