# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of rows of a batch's samples, from which a bridge plans its exchange.

A rank needs the numbers for the samples that it encodes and for those that it consumes. If the
batch does not bring them, the ranks exchange what they know.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.bridge.topology import BridgeDirection, BridgeTopology


class SampleRows(NamedTuple):
    """Rows of consecutive samples of the batch, on the host.

    Args:
        counts: number of rows of each sample.
        owners: int64 [rows], the destination CP rank that consumes each row; on other CP ranks its
            gradient is zero and is not moved. None: gradients of all CP ranks are moved and added.
    """

    counts: Sequence[int]
    owners: np.ndarray | None = None

    def in_atoms(self, atoms: int) -> AtomRows:
        """The same rows, counted by ``atoms`` equal runs of samples.

        Raises:
            ValueError: ``atoms`` does not divide the number of samples.
        """
        size, rest = divmod(len(self.counts), atoms)
        if rest:
            raise ValueError(f"{len(self.counts)} samples are not divisible by {atoms}")
        bounds = [0, *accumulate(self.counts)]
        counts = [bounds[(i + 1) * size] - bounds[i * size] for i in range(atoms)]
        return AtomRows(counts, self.owners)


def told_rows(
    topology: BridgeTopology,
    everyone: dist.ProcessGroup,
    block: dist.ProcessGroup,
    device: torch.device,
    encoded: int,
    consumed: SampleRows,
) -> tuple[AtomRows, AtomRows]:
    """Rows of the atoms that this rank encodes and consumes, from counts that the ranks exchange.

    Collective over all ranks of the bridge, so that none continues where another fails; waits for
    the device.

    Args:
        topology: topology of the bridge.
        everyone, block: groups of all ranks of the bridge, and of this rank's block.
        device: device of the collectives.
        encoded: number of rows that this rank encodes.
        consumed: rows that this rank's destination DP index consumes, passed on all pipeline
            stages; of their counts only the sum is read.

    Raises:
        ValueError: encoders make another number of rows than is consumed; or neither DP size
            divides the other, so that no rank knows the rows of a single atom. Raised on all ranks.
    """
    if not topology.divides:
        raise ValueError(
            f"source dp={topology.src_dp} and destination dp={topology.dest_dp}, of which neither "
            f"divides the other, need to be told the rows of each sample"
        )
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(everyone)
    table = _gather(torch.tensor([encoded, sum(consumed.counts)]), everyone, device)
    made = {topology.encodes(r): int(table[i, 0]) for i, r in enumerate(ranks)}
    used = {
        topology.consumes(r): int(table[i, 1])
        for i, r in enumerate(ranks)
        if topology.dest[r].pp == 0
    }
    finer, coarser = made, used
    if topology.direction is BridgeDirection.FAN_OUT:
        finer, coarser = used, made
    rows = {run.start: count for run, count in finer.items()}

    def of(atoms: range) -> list[int]:
        return [rows[atom] for atom in atoms]

    for run, count in coarser.items():
        if sum(of(run)) != count:
            counts = {part.start: rows for part, rows in finer.items() if part.start in run}
            many, one = [counts[atom] for atom in sorted(counts)], [count]
            makes, uses = (one, many) if coarser is made else (many, one)
            raise ValueError(
                f"of the same samples, encoders make {makes} rows, but the destination consumes "
                f"{uses}; in {topology.atoms} equal runs of the batch, they are {run.start} to "
                f"{run.stop - 1}"
            )
    owners = None
    if consumed.owners is not None:
        padded = torch.zeros(max(used.values()), dtype=torch.int64)
        if topology.dest[rank].pp == 0:
            padded[: len(consumed.owners)] = torch.from_numpy(consumed.owners)
        by_rank = _gather(padded, block, device)
        members = enumerate(dist.get_process_group_ranks(block))
        consumer = {
            topology.consumes(r): by_rank[i] for i, r in members if topology.dest[r].pp == 0
        }
        by_atom = {
            atom: part
            for run, row in consumer.items()
            for atom, part in zip(run, np.split(row, np.cumsum(of(run)))[:-1], strict=True)
        }
        owners = np.concatenate([by_atom[atom] for atom in topology.encodes(rank)])
    consumes = topology.consumes(rank) if topology.dest[rank].pp == 0 else range(0)
    return (
        AtomRows(of(topology.encodes(rank)), owners),
        AtomRows(of(consumes), consumed.owners),
    )


def _gather(values: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> np.ndarray:
    """Every member's ``values`` [n], as [members, n] on the host."""
    gathered = torch.empty(group.size() * len(values), dtype=values.dtype, device=device)
    dist.all_gather_into_tensor(gathered, values.to(device), group=group)
    return gathered.cpu().numpy().reshape(group.size(), len(values))
