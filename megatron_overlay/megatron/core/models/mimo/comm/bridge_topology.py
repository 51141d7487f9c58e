# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where every rank stands on both sides of a bridge; plain data, no processes, any world size."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron.core.hyper_comm_grid import HyperCommGrid

DIMS = ("tp", "cp", "pp", "dp")


class BridgeDirection(StrEnum):
    """Which side of a bridge has more DP ranks."""

    FAN_IN = "fan_in"
    """The source: a destination rank needs the rows of several source DP ranks."""

    FAN_OUT = "fan_out"
    """The destination: a destination rank needs a slice of one source DP rank's rows."""

    EQUAL = "equal"
    """Neither: a destination rank needs the rows that it holds as a source rank."""


class Coordinates(NamedTuple):
    """Indices of one rank along the dims of one grid."""

    dp: int
    tp: int
    cp: int
    pp: int


@dataclass(frozen=True)
class BridgeTopology:
    """Positions of all ranks of two aligned grids, and the rank groups that follow from them.

    Attributes:
        src: coordinates of each global rank in the source grid; its cp and pp are 0.
        dest: coordinates of each global rank in the destination grid.
        src_dp, dest_dp: DP sizes.
    """

    src: dict[int, Coordinates]
    dest: dict[int, Coordinates]
    src_dp: int
    dest_dp: int

    @property
    def direction(self) -> BridgeDirection:
        """Which side has more DP ranks."""
        if self.src_dp == self.dest_dp:
            return BridgeDirection.EQUAL
        return BridgeDirection.FAN_IN if self.src_dp > self.dest_dp else BridgeDirection.FAN_OUT

    @property
    def scale(self) -> int:
        """How many DP ranks of the finer side share one of the coarser side."""
        return max(self.src_dp, self.dest_dp) // min(self.src_dp, self.dest_dp)

    @cached_property
    def dest_cp(self) -> int:
        """CP size of the destination."""
        return 1 + max(at.cp for at in self.dest.values())

    @cached_property
    def dest_pp(self) -> int:
        """PP size of the destination."""
        return 1 + max(at.pp for at in self.dest.values())

    @property
    def exchanges(self) -> bool:
        """Whether anything ever crosses ranks: all but equal DP with cp=1 and pp=1."""
        return (self.scale, self.dest_cp, self.dest_pp) != (1, 1, 1)

    def slot(self, rank: int) -> int:
        """Which of the ``scale`` parts of the coarser side's batch is this rank's on the finer."""
        finer = self.dest if self.direction is BridgeDirection.FAN_OUT else self.src
        return finer[rank].dp % self.scale

    @cached_property
    def blocks(self) -> list[list[int]]:
        """Ranks that share one DP index of the coarser side; no traffic leaves a block."""
        blocks = defaultdict(list)
        coarser = self.src if self.direction is BridgeDirection.FAN_OUT else self.dest
        for rank, at in coarser.items():
            blocks[at.dp].append(rank)
        return [sorted(blocks[dp]) for dp in sorted(blocks)]

    @cached_property
    def gather_groups(self) -> list[list[int]]:
        """Per block, ranks with one rank of every slot, in slot order; none with equal DP.

        Fan-in: one group per (dest_dp, src_tp). Fan-out: one per (src_dp, dest_tp, cp, pp). Every
        rank lies in exactly one.
        """
        if self.direction is BridgeDirection.EQUAL:
            return []
        finer = self.dest if self.direction is BridgeDirection.FAN_OUT else self.src
        groups = defaultdict(list)
        for rank, at in sorted(finer.items(), key=lambda item: item[1].dp):
            groups[at.dp // self.scale, at.tp, at.cp, at.pp].append(rank)
        return [groups[key] for key in sorted(groups)]


def bridge_topology(src_grid: HyperCommGrid, dest_grid: HyperCommGrid) -> BridgeTopology:
    """Read both grids and check that a bridge from one to the other pairs the right batches.

    Raises:
        ValueError: the grids span different ranks, lack ``tp`` or ``dp``, have other dims than
            tp, cp, pp, dp, the source has CP or PP, neither DP size divides the other, or a rank's
            source and destination DP indices belong to different parts of the batch.
    """
    if src_grid.size != dest_grid.size:
        raise ValueError(
            "Grids must span same number of ranks, as colocated modules share them: the source "
            f"has {src_grid.size}, the destination {dest_grid.size}"
        )
    if src_grid.rank_offset != dest_grid.rank_offset:
        raise ValueError(
            "Grids must have same rank offset, as colocated modules share their ranks: the source "
            f"has {src_grid.rank_offset}, the destination {dest_grid.rank_offset}"
        )
    src_sizes, dest_sizes = _sizes("source", src_grid), _sizes("destination", dest_grid)
    for dim in ("pp", "cp"):
        if src_sizes[dim] != 1:
            raise ValueError(
                f"source {dim.upper()} must be 1, got {src_sizes[dim]}: the bridge takes rows from "
                f"ranks that hold whole samples; give those ranks to dp or tp"
            )
    src_dp, dest_dp = src_sizes["dp"], dest_sizes["dp"]
    if src_dp % dest_dp and dest_dp % src_dp:
        raise ValueError(
            f"DP sizes must be evenly divisible, one by the other: source dp={src_dp}, "
            f"destination dp={dest_dp}"
        )
    topology = BridgeTopology(_coordinates(src_grid), _coordinates(dest_grid), src_dp, dest_dp)
    _check_alignment(topology, src_grid, dest_grid)
    return topology


def _sizes(side: str, grid: HyperCommGrid) -> dict[str, int]:
    sizes = dict.fromkeys(DIMS, 1) | dict(zip(grid.dim_names, grid.shape, strict=True))
    for dim in ("tp", "dp"):
        if dim not in grid.dim_names:
            raise ValueError(f"{side} grid must have '{dim}' dimension, got {grid.dim_names}")
    other = {dim: size for dim, size in sizes.items() if dim not in DIMS and size != 1}
    if other:
        raise ValueError(
            f"{side} grid has dims {other}, whose part in a batch is unknown; register expert dims "
            f"as a view"
        )
    return sizes


def _coordinates(grid: HyperCommGrid) -> dict[int, Coordinates]:
    axes = np.unravel_index(np.arange(grid.size), tuple(grid.shape)[::-1])
    index = dict.fromkeys(DIMS, np.zeros(grid.size, dtype=int))
    index.update(zip(reversed(grid.dim_names), axes, strict=True))
    columns = zip(*(index[dim].tolist() for dim in Coordinates._fields), strict=True)
    return {grid.rank_offset + i: Coordinates(*at) for i, at in enumerate(columns)}


def _check_alignment(
    topology: BridgeTopology, src_grid: HyperCommGrid, dest_grid: HyperCommGrid
) -> None:
    into = topology.scale if topology.direction is BridgeDirection.FAN_IN else 1
    out = topology.scale if topology.direction is BridgeDirection.FAN_OUT else 1
    for rank, src in topology.src.items():
        dest = topology.dest[rank]
        if src.dp // into != dest.dp // out:
            raise ValueError(
                f"grids are not aligned: rank {rank} encodes samples of source dp {src.dp} of "
                f"{topology.src_dp}, but as destination dp {dest.dp} of {topology.dest_dp} it "
                f"consumes others (source {src_grid.shape} along {src_grid.dim_names}, "
                f"destination {dest_grid.shape} along {dest_grid.dim_names}, fastest first); make "
                f"dp the slowest dim of both, e.g. ['tp', 'cp', 'pp', 'dp']"
            )
