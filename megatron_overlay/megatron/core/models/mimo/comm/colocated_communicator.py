# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge between two colocated modules that have different layouts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.plan import AtomRows, plan_block
from megatron.core.models.mimo.bridge.sample_rows import SampleRows, told_rows
from megatron.core.models.mimo.bridge.topology import BridgeDirection, bridge_topology
from megatron.core.token_layout import Moving, Route, exchange
from megatron.core.utils import log_single_rank

__all__ = ["BridgeDirection", "ColocatedBridgeCommunicator", "SampleRows", "SliceInfo"]

logger = logging.getLogger(__name__)


@dataclass
class SliceInfo:
    """A rank's part of the batch dim: ``size`` entries from ``start``."""

    start: int
    size: int


class ColocatedBridgeCommunicator:
    """Moves a source module's output to a destination module, and its gradient back.

    The source has TP and DP; the destination has TP, CP, DP and PP; the dims may be in any order.
    Source DP index e encodes the ``topology.parts[e]``-th of ``src_dp`` equal runs of the batch;
    destination DP index d consumes the d-th of ``dest_dp``.

    In the forward, every rank of the destination's first stage ends with all rows of its DP index,
    the same on all its CP ranks; later stages end with an empty tensor. In the backward, each
    source rank receives the full gradient of the rows that it produced: summed over the CP ranks,
    and taken once from the TP replicas. Each rank receives only rows that it needs and lacks.

    The source's output must be the same on all its TP ranks. Construction is collective over the
    world.

    Args:
        src_grid: factorization of the ranks for the source; CP and PP 1.
        dest_grid: factorization of the same ranks for the destination.
        src_module_name, dest_module_name: names of the modules in messages.
        dim_mapping: tensor dim by name, of which ``b``, the batch, is read. The default is
            ``[b, s, h]``; ``{'b': 0, 'h': 1}`` is for flat embeddings, whose rows are the samples'
            tokens one after the other.

    Attributes:
        rank_to_src_pos: (dp, tp) of each global rank.
        rank_to_dest_pos: (dp, tp) of the ranks with cp=0 and pp=0.
        rank_to_dest_coords: (dp, tp, cp) of the ranks with pp=0.
        direction, scale: the side with more DP ranks, and the atoms of a coarser DP index (where
            one DP size divides the other, their ratio).
        gather_group_ranks, gather_pg: groups of ranks that have one slot each of a coarser DP
            index's batch, and this rank's process group; kept for upstream's callers, unused here.

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

        self.gather_pg = self._new_group(self.gather_group_ranks)
        self.block_pg = self._new_group(self.topology.blocks if self.topology.exchanges else [])
        self.all_pg = self._new_group([sorted(dest)] if self.topology.exchanges else [])
        self.return_pg: dist.ProcessGroup | None = None
        if self.block_pg is not None:
            members = dist.get_process_group_ranks(self.block_pg)
            self._plan = plan_block(self.topology, members)
            self._member = members.index(self.current_rank)
            runs = ((self.topology.encodes(r), self.topology.consumes(r)) for r in dest)
            self._encodes_own = all(set(encoded) <= set(consumed) for encoded, consumed in runs)
        log_single_rank(
            logger,
            logging.INFO,
            f"bridge {src_module_name} {dict(zip(src_grid.dim_names, src_grid.shape, strict=True))}"
            f" -> {dest_module_name} "
            f"{dict(zip(dest_grid.dim_names, dest_grid.shape, strict=True))}: "
            f"{self.direction.value}, scale {self.scale}, {len(self.topology.blocks)} blocks",
        )

    def is_fan_in(self) -> bool:
        """Whether the source has more DP ranks."""
        return self.direction is BridgeDirection.FAN_IN

    def is_fan_out(self) -> bool:
        """Whether the destination has more DP ranks."""
        return self.direction is BridgeDirection.FAN_OUT

    def get_slice_info(self, batch_size: int) -> SliceInfo:
        """This rank's slot in the batch, of ``batch_size`` equal entries, of a coarser DP index.

        Fan-out: the entries of the source's batch that the rank consumes. Fan-in: the entries of
        the destination's batch that the rank produced. Equal: all entries. The slot is the same on
        all CP ranks and pipeline stages of a DP index.

        Raises:
            ValueError: ``scale`` does not divide ``batch_size``, or neither DP size divides the
                other.
        """
        if not self.topology.divides:
            raise ValueError(
                f"no slots: neither of source dp={self.topology.src_dp} and destination "
                f"dp={self.topology.dest_dp} divides the other"
            )
        self._check_divisible(batch_size, self.scale)
        size = batch_size // self.scale
        return SliceInfo(start=self.topology.slot(self.current_rank) * size, size=size)

    def communicate(
        self,
        tensor: Tensor,
        encoded: SampleRows | None = None,
        consumed: SampleRows | None = None,
    ) -> Tensor:
        """Plan the routes of one batch and move its rows along them.

        Takes the arguments, and raises the errors, of :meth:`plan_routes` and :meth:`exchange`.
        """
        num_rows = tensor.size(self.dim_mapping["b"])
        return self.exchange(tensor, self.plan_routes(num_rows, encoded, consumed, tensor.device))

    def plan_routes(
        self,
        num_rows: int,
        encoded: SampleRows | None,
        consumed: SampleRows | None,
        device: torch.device,
    ) -> tuple[Route, Route] | None:
        """Plan a batch's forward and backward routes over the bridge, on the host.

        May be called before the source's layers run. All ranks must pass the same set of arguments.
        With both ``encoded`` and ``consumed``, nothing is sent and nothing waits for the device,
        unless ``encoded`` lacks the owners that ``consumed`` has and some rank encodes samples that
        another DP index consumes. In that case, and with ``consumed`` alone, the ranks exchange
        their counts, and the host waits for the device.

        Args:
            num_rows: entries in the batch dim of the source's tensor on this rank; may be 0.
            encoded: rows of each sample that this rank encodes. If both are None, all samples have
                equally many rows, and the gradients of all CP ranks are added.
            consumed: rows of each sample that this rank's destination DP index consumes, the same
                on all ranks of that index, later pipeline stages included. Without ``encoded`` only
                their sum is read.
            device: device of the tensor.

        Returns:
            Forward and backward route; None if no rank ever takes rows from another.

        Raises:
            ValueError: the counts don't add up, or a rank's share is not a whole number of samples.
                Raised on all ranks if they exchange their counts; else on the rank that finds it.
        """
        if self.block_pg is None:
            if consumed is not None:
                self._check_sum(consumed, num_rows)
            return None
        made, used = self._atom_rows(num_rows, encoded, consumed, device)
        forward, backward = self._plan.routes(self._member, made, used)
        return forward.to(device), backward.to(device)

    def exchange(self, tensor: Tensor, routes: tuple[Route, Route] | None) -> Tensor:
        """Move rows along the routes from :meth:`plan_routes`; differentiable.

        ``[..., rows produced, ...]`` becomes ``[..., rows consumed, ...]`` along the batch dim,
        with 0 rows on later pipeline stages. Collective over the ranks of a block, in the backward
        too: either all of them, including those without a row, pass a tensor that requires grad and
        run the backward, or none does.
        """
        if routes is None:
            return tensor.contiguous()
        batch_dim = self.dim_mapping["b"]
        forward, backward = routes
        rows = tensor.movedim(batch_dim, 0)
        moved = exchange(rows, forward, self.block_pg, adjoint=backward, name="mimo bridge")
        return moved.movedim(0, batch_dim).contiguous()

    def make_return_group(self) -> None:
        """Make a process group for gradients alone; collective over the world.

        Each direction of the bridge then has its own order of exchanges.
        """
        self.return_pg = self._new_group(self.topology.blocks if self.topology.exchanges else [])
        for group in filter(None, (self.block_pg, self.return_pg)):
            # The first exchange between two ranks blocks the host until both take part.
            token = torch.zeros(group.size(), device=torch.cuda.current_device())
            dist.all_to_all_single(torch.empty_like(token), token, group=group)

    def begin(self, rows: Tensor, routes: tuple[Route, Route]) -> Moving:
        """Start moving rows ``[rows, H]`` to the destination without waiting; not differentiable.

        Collective over the ranks of a block, which all start their exchanges in one order.
        """
        return Moving(rows, routes[0], self.block_pg)

    def begin_return(self, gradient: Tensor, routes: tuple[Route, Route]) -> Moving:
        """Start moving the gradient ``[rows, H]`` of consumed rows back, as :meth:`begin` does."""
        return Moving(gradient, routes[1], self.return_pg)

    def destroy(self) -> None:
        """Free the process groups that this bridge made; the grids keep theirs."""
        for group in (self.gather_pg, self.block_pg, self.all_pg, self.return_pg):
            if group is not None:
                dist.destroy_process_group(group)
        self.gather_pg = self.block_pg = self.all_pg = self.return_pg = None

    def must_ask(self, encoded: SampleRows | None, consumed: SampleRows) -> bool:
        """Whether :meth:`plan_routes` must exchange counts between ranks; the same on all ranks."""
        return encoded is None or (
            encoded.owners is None and consumed.owners is not None and not self._encodes_own
        )

    def _new_group(self, ranks: list[list[int]]) -> dist.ProcessGroup | None:
        if not ranks:
            return None
        group, _ = dist.new_subgroups_by_enumeration(ranks, backend=self.dest_grid.backend)
        return group

    def _atom_rows(
        self,
        num_rows: int,
        encoded: SampleRows | None,
        consumed: SampleRows | None,
        device: torch.device,
    ) -> tuple[AtomRows, AtomRows]:
        """Rows of the atoms that this rank encodes, and of the atoms that it consumes."""
        makes, uses = (
            len(run(self.current_rank)) for run in (self.topology.encodes, self.topology.consumes)
        )
        if consumed is None:
            self._check_divisible(num_rows, makes)
            return AtomRows([num_rows // makes] * makes), AtomRows([num_rows // makes] * uses)
        for rows in filter(None, (encoded, consumed)):
            self._check_owners(rows)
        if self.must_ask(encoded, consumed):
            groups = (self.all_pg, self.block_pg)
            return told_rows(self.topology, *groups, device, num_rows, consumed)
        self._check_sum(encoded, num_rows)
        made, used = encoded.in_atoms(makes), consumed.in_atoms(uses)
        if made.owners is None and used.owners is not None:
            ahead = self.topology.encodes(self.current_rank).start
            first = sum(used.counts[: ahead - self.topology.consumes(self.current_rank).start])
            made = made._replace(owners=used.owners[first : first + num_rows])
        return made, used

    def _check_sum(self, samples: SampleRows, rows: int) -> None:
        total = sum(samples.counts)
        if total != rows:
            raise ValueError(
                f"the samples have {total} rows, but {self.src_module_name} has {rows}"
            )

    def _check_owners(self, rows: SampleRows) -> None:
        owners, expected, cp = rows.owners, sum(rows.counts), self.topology.dest_cp
        if owners is None:
            return
        if owners.shape != (expected,) or ((owners < 0) | (owners >= cp)).any():
            raise ValueError(
                f"owners must give a CP rank below {cp} for each of {expected} rows of "
                f"{self.dest_module_name}, got shape {tuple(owners.shape)}"
                + (f" with values {owners.min()}…{owners.max()}" if owners.size else "")
            )

    def _check_divisible(self, rows: int, parts: int) -> None:
        if rows % parts:
            raise ValueError(
                f"{rows} rows are not divisible by {self.direction.value}: {parts} equal parts are "
                f"needed (scale={self.scale})"
            )
