# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's interface of the bridge between colocated modules, over our plan and exchange."""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist

from megatron.core.models.mimo.bridge.bridge import Bridge
from megatron.core.models.mimo.bridge.topology import BridgeTopology


class BridgeDirection(StrEnum):
    """The side of a bridge that has more DP ranks."""

    FAN_IN = "fan_in"
    """The source: a destination rank needs the rows of several source DP ranks."""

    FAN_OUT = "fan_out"
    """The destination: a destination rank needs a slice of one source DP rank's rows."""

    EQUAL = "equal"
    """Neither: a destination rank needs the rows of one source DP rank."""


@dataclass
class SliceInfo:
    """A rank's part of the batch dim: ``size`` entries from ``start``."""

    start: int
    size: int


class ColocatedBridgeCommunicator(Bridge):
    """A :class:`Bridge` with the attributes of upstream's class; MimoModel needs only the bridge.

    Attributes:
        rank_to_src_pos: (dp, tp) of each global rank.
        rank_to_dest_pos: (dp, tp) of the ranks with cp=0 and pp=0.
        direction: the side with more DP ranks.
        scale: number of atoms of a DP index of the side with fewer; where one DP size divides the
            other, their ratio.
        gather_group_ranks, gather_pg: groups of ranks that have one slot each of a coarser DP
            index's batch, and this rank's process group; kept for upstream's callers, unused here.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        src, dest = self.topology.src, self.topology.dest
        self.rank_to_src_pos = {r: (at.dp, at.tp) for r, at in src.items()}
        self.rank_to_dest_pos = {r: (at.dp, at.tp) for r, at in dest.items() if at.cp == at.pp == 0}
        self.direction = direction_of(self.topology)
        self.scale = self.topology.atoms // min(self.topology.src_dp, self.topology.dest_dp)
        self.gather_group_ranks = gather_groups(self.topology)
        self.gather_pg = self._new_group(self.gather_group_ranks)

    def is_fan_in(self) -> bool:
        """Return whether the source has more DP ranks."""
        return self.direction is BridgeDirection.FAN_IN

    def is_fan_out(self) -> bool:
        """Return whether the destination has more DP ranks."""
        return self.direction is BridgeDirection.FAN_OUT

    def get_slice_info(self, batch_size: int) -> SliceInfo:
        """Return this rank's slot in a coarser DP index's batch of ``batch_size`` equal entries.

        Fan-out: the entries of the source's batch that the rank consumes. Fan-in: the entries of
        the destination's batch that the rank produced. Equal: all entries. The slot is the same on
        all CP ranks and pipeline stages of a DP index.

        Raises:
            ValueError: ``scale`` does not divide ``batch_size``, or neither DP size divides the
                other.
        """
        if not divides(self.topology):
            raise ValueError(
                f"no slots: neither of source dp={self.topology.src_dp} and destination "
                f"dp={self.topology.dest_dp} divides the other"
            )
        if batch_size % self.scale:
            raise ValueError(f"{batch_size} rows are not divisible by {self._parts(self.scale)}")
        size = batch_size // self.scale
        finer = self.topology.consumes if self.is_fan_out() else self.topology.encodes
        return SliceInfo(start=finer(self.current_rank).start % self.scale * size, size=size)

    def destroy(self) -> None:
        """Free the process groups that this bridge made; the grids keep theirs."""
        super().destroy()
        if self.gather_pg is not None:
            dist.destroy_process_group(self.gather_pg)
        self.gather_pg = None

    def _parts(self, parts: int) -> str:
        return f"{self.direction.value}: {parts} equal parts are needed (scale={self.scale})"


def direction_of(topology: BridgeTopology) -> BridgeDirection:
    """Return the side that has more DP ranks."""
    if topology.src_dp == topology.dest_dp:
        return BridgeDirection.EQUAL
    fan_in = topology.src_dp > topology.dest_dp
    return BridgeDirection.FAN_IN if fan_in else BridgeDirection.FAN_OUT


def divides(topology: BridgeTopology) -> bool:
    """Return whether one DP size divides the other, so that each finer DP index has one atom."""
    return topology.atoms == max(topology.src_dp, topology.dest_dp)


def gather_groups(topology: BridgeTopology) -> list[list[int]]:
    """Return the groups that have one rank for every slot of a coarser DP index, in slot order.

    Fan-in: one group per (dest_dp, src_tp). Fan-out: one per (src_dp, dest_tp, cp, pp). Every rank
    lies in exactly one. There are no groups if the DP sizes are equal, or if neither divides the
    other, so that a finer index would share samples with two coarser ones.
    """
    direction = direction_of(topology)
    if direction is BridgeDirection.EQUAL or not divides(topology):
        return []
    fan_out = direction is BridgeDirection.FAN_OUT
    finer, atoms = (
        (topology.dest, topology.consumes) if fan_out else (topology.src, topology.encodes)
    )
    scale = topology.atoms // min(topology.src_dp, topology.dest_dp)
    groups = defaultdict(list)
    for rank in sorted(finer, key=lambda rank: (atoms(rank).start, rank)):
        at = finer[rank]
        groups[atoms(rank).start // scale, at.tp, at.cp, at.pp].append(rank)
    return [groups[key] for key in sorted(groups)]
