# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge between two colocated modules that have different layouts."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.plan import AtomRows, plan_block
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.token_layout import Moving, Route, exchange

NAME = "mimo bridge"
"""Name of the exchanges in a profiler's trace."""


class Bridge:
    """Moves a source module's output to a destination module, and its gradient back.

    The source has TP and DP; the destination has TP, CP, DP and PP; the dims may be in any order.
    Source DP index e encodes the ``topology.parts[e]``-th of ``src_dp`` equal runs of the batch;
    destination DP index d consumes the d-th of ``dest_dp``.

    In the forward, every rank of the destination's first stage ends with all rows of its DP index,
    the same on all its CP ranks; later stages end with an empty tensor. In the backward, each
    source rank receives the full gradient of the rows that it produced: from the CP ranks that own
    their tokens, and taken once from the TP replicas. Each rank receives only rows that it needs
    and lacks.

    The source's output must be the same on all its TP ranks. Construction is collective over the
    world.

    Args:
        src_grid: factorization of the ranks for the source; CP and PP 1.
        dest_grid: factorization of the same ranks for the destination.
        src_module_name, dest_module_name: names of the modules in messages.
        dim_mapping: tensor dim by name, of which ``b``, the batch, is read. The default is
            ``[b, s, h]``; ``{'b': 0, 'h': 1}`` is for flat embeddings, whose rows are the samples'
            tokens one after the other.

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
        sizes = self.topology.src_dp, self.topology.dest_dp
        self._atoms = tuple(self.topology.atoms // dp for dp in sizes)  # encoded, consumed
        exchanges, ranks = self.topology.exchanges, sorted(self.topology.dest)
        self.block_pg = self._new_group(self.topology.blocks if exchanges else [])
        self.all_pg = self._new_group([ranks] if exchanges else [])
        if self.block_pg is not None:
            members = dist.get_process_group_ranks(self.block_pg)
            self._plan = plan_block(self.topology, members)
            self._member = members.index(self.current_rank)

    def communicate(
        self, tensor: Tensor, encoded: AtomRows | None = None, consumed: AtomRows | None = None
    ) -> Tensor:
        """Plan the routes of one batch and move its rows along them; differentiable.

        ``[..., rows produced, ...]`` becomes ``[..., rows consumed, ...]`` along the batch dim,
        with 0 rows on later pipeline stages. Collective over the ranks of a block, in the backward
        too: either all of them, including those without a row, pass a tensor that requires grad and
        run the backward, or none does.
        """
        batch_dim = self.dim_mapping["b"]
        routes = self.plan_routes(tensor.size(batch_dim), encoded, consumed, tensor.device)
        if routes is None:
            return tensor.contiguous()
        forward, backward = routes
        rows = tensor.movedim(batch_dim, 0)
        moved = exchange(rows, forward, self.block_pg, adjoint=backward, name=NAME)
        return moved.movedim(0, batch_dim).contiguous()

    def plan_routes(
        self,
        num_rows: int,
        encoded: AtomRows | None,
        consumed: AtomRows | None,
        device: torch.device,
    ) -> tuple[Route, Route] | None:
        """Plan a batch's forward and backward routes over the bridge, on the host.

        Nothing is sent, and nothing waits for the device.

        Args:
            num_rows: entries in the batch dim of the source's tensor on this rank; may be 0.
            encoded: rows of the atoms that this rank encodes. If it is None, all atoms have equally
                many rows, and the gradients of all CP ranks are added.
            consumed: rows of the atoms that this rank's destination DP index consumes, the same on
                all ranks of that index, later pipeline stages included.
            device: device of the tensor.

        Returns:
            Forward and backward route; None if no rank ever takes rows from another.

        Raises:
            ValueError: the rows do not fit the tensor or the bridge; raised on the rank that finds
                it.
        """
        if encoded is None or consumed is None:
            encoded, consumed = self.equal_rows(num_rows)
        elif (total := sum(encoded.counts)) != num_rows:
            raise ValueError(
                f"the samples have {total} rows, but {self.src_module_name} has {num_rows}"
            )
        if self.block_pg is None:
            return None
        for rows, atoms in zip((encoded, consumed), self._atoms, strict=True):
            self._check(rows, atoms)
        forward, backward = self._plan.routes(self._member, encoded, consumed)
        return forward.to(device), backward.to(device)

    def equal_rows(self, num_rows: int) -> tuple[AtomRows, AtomRows]:
        """Return the rows that this rank encodes and consumes if all atoms have equally many.

        Raises:
            ValueError: ``num_rows``, which this rank encodes, is not divisible by its atoms.
        """
        makes, uses = self._atoms
        if self.block_pg is not None and num_rows % makes:
            raise ValueError(f"{num_rows} rows are not divisible by {self._parts(makes)}")
        each = num_rows // makes
        return AtomRows([each] * makes), AtomRows([each] * uses)

    def check_equal(self, num_rows: int, tokens: int, device: torch.device) -> None:
        """Check that all samples have equally many rows, as a batch without a plan must.

        Collective over all ranks of the bridge, so that none continues where another fails; waits
        for the device.

        Args:
            tokens: number of tokens that rows replace on this rank's destination DP index.

        Raises:
            ValueError: they have not; on all ranks alike.
        """
        makes, uses = self._atoms
        each = num_rows / makes, tokens / uses
        most = torch.tensor([max(each), -min(each)], dtype=torch.float64, device=device)
        if self.all_pg is not None:  # else each rank consumes what it encodes
            dist.all_reduce(most, dist.ReduceOp.MAX, self.all_pg)
        high, low = most.tolist()
        if high + low or high % 1:
            raise ValueError(
                f"each of {self.topology.atoms} equal parts of a batch must have as many rows of "
                f"{self.src_module_name} as any other, and as many tokens for them; they have "
                f"{-low:g} to {high:g}. Give the microbatches a batch_plan (a BatchPlan)"
            )

    def begin(self, rows: Tensor, route: Route) -> Moving:
        """Start moving rows ``[rows, H]``, or their gradient, without waiting; not differentiable.

        Collective over the ranks of a block, which all start their exchanges in one order.
        """
        with record_function(NAME):
            return Moving(rows, route, self.block_pg)

    def destroy(self) -> None:
        """Free the process groups that this bridge made; the grids keep theirs."""
        for group in (self.block_pg, self.all_pg):
            if group is not None:
                dist.destroy_process_group(group)
        self.block_pg = self.all_pg = None

    def _new_group(self, ranks: list[list[int]]) -> dist.ProcessGroup | None:
        if not ranks:
            return None
        group, _ = dist.new_subgroups_by_enumeration(ranks, backend=self.dest_grid.backend)
        return group

    def _parts(self, parts: int) -> str:
        return f"{parts}, the number of its equal parts of the batch"

    def _check(self, rows: AtomRows, atoms: int) -> None:
        owners, expected, cp = rows.owners, sum(rows.counts), self.topology.dest_cp
        if len(rows.counts) != atoms:
            raise ValueError(f"the rows of {atoms} atoms are needed, got {len(rows.counts)}")
        if owners is None:
            return
        if owners.shape != (expected,) or ((owners < 0) | (owners >= cp)).any():
            raise ValueError(
                f"owners must give a CP rank below {cp} for each of {expected} rows of "
                f"{self.dest_module_name}, got shape {tuple(owners.shape)}"
                + (f" with values {owners.min()}…{owners.max()}" if owners.size else "")
            )
