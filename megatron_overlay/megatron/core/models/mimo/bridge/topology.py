# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Position of every rank on both sides of a bridge; plain data, no processes, any world size."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.sample_ownership import assign_parts

DIMS = ("tp", "cp", "dp", "pp")


class BridgeDirection(StrEnum):
    """The side of a bridge that has more DP ranks."""

    FAN_IN = "fan_in"
    """The source: a destination rank needs the rows of several source DP ranks."""

    FAN_OUT = "fan_out"
    """The destination: a destination rank needs a slice of one source DP rank's rows."""

    EQUAL = "equal"
    """Neither: a destination rank needs the rows of one source DP rank."""


class Coordinates(NamedTuple):
    """Indices of one rank along the dims of one grid."""

    dp: int
    tp: int
    cp: int
    pp: int


@dataclass(frozen=True)
class BridgeTopology:
    """Positions of all ranks of two grids, and the rank groups that follow from them.

    The batch is cut into *atoms*: ``lcm(src_dp, dest_dp)`` equal runs of samples, so that each DP
    index of either side has whole atoms.

    Attributes:
        src: coordinates of each global rank in the source grid; its cp and pp are 0.
        dest: coordinates of each global rank in the destination grid.
        src_dp, dest_dp: DP sizes.
        parts: for each source DP index, the index of the one of ``src_dp`` equal runs of the batch
            that it encodes.
    """

    src: dict[int, Coordinates]
    dest: dict[int, Coordinates]
    src_dp: int
    dest_dp: int
    parts: tuple[int, ...]

    @property
    def direction(self) -> BridgeDirection:
        """The side that has more DP ranks."""
        if self.src_dp == self.dest_dp:
            return BridgeDirection.EQUAL
        return BridgeDirection.FAN_IN if self.src_dp > self.dest_dp else BridgeDirection.FAN_OUT

    @property
    def atoms(self) -> int:
        """Number of atoms that the batch is cut into."""
        return math.lcm(self.src_dp, self.dest_dp)

    @property
    def scale(self) -> int:
        """Number of atoms of one DP index of the coarser side, the side with fewer DP ranks."""
        return self.atoms // min(self.src_dp, self.dest_dp)

    @property
    def divides(self) -> bool:
        """Whether one DP size divides the other, so that each finer DP index has one atom."""
        return self.atoms == max(self.src_dp, self.dest_dp)

    @cached_property
    def dest_cp(self) -> int:
        """CP size of the destination."""
        return 1 + max(at.cp for at in self.dest.values())

    @cached_property
    def dest_pp(self) -> int:
        """PP size of the destination."""
        return 1 + max(at.pp for at in self.dest.values())

    def encodes(self, rank: int) -> range:
        """Atoms that a rank encodes."""
        return _run(self.parts[self.src[rank].dp], self.atoms // self.src_dp)

    def consumes(self, rank: int) -> range:
        """Atoms that the destination DP index of a rank consumes, on the first pipeline stage."""
        return _run(self.dest[rank].dp, self.atoms // self.dest_dp)

    @cached_property
    def exchanges(self) -> bool:
        """Whether any row or gradient ever moves between ranks."""
        return self.dest_cp * self.dest_pp > 1 or any(
            self.encodes(rank) != self.consumes(rank) for rank in self.src
        )

    def slot(self, rank: int) -> int:
        """Index of this rank's atom on the finer side among its coarser index's ``scale`` atoms."""
        finer = self.consumes if self.direction is BridgeDirection.FAN_OUT else self.encodes
        return finer(rank).start % self.scale

    @cached_property
    def blocks(self) -> list[list[int]]:
        """Sets of ranks connected, directly or through others, by samples they encode or consume.

        No traffic leaves a block. Every rank encodes, so it lies in exactly one block.
        """
        block = list(range(self.atoms))  # a union-find forest: each atom points to one of its block

        def root(atom: int) -> int:
            while block[atom] != atom:
                block[atom] = atom = block[block[atom]]
            return atom

        def join(atoms: range | set[int]) -> None:
            first, *others = atoms
            for atom in others:
                block[root(atom)] = root(first)

        runs = {run for rank in self.src for run in (self.encodes(rank), self.consumes(rank))}
        for atoms in runs:
            join(atoms)
        for rank, at in self.dest.items():
            if at.pp == 0:
                join({self.encodes(rank).start, self.consumes(rank).start})
        members = defaultdict(list)
        for rank in sorted(self.src):
            members[root(self.encodes(rank).start)].append(rank)
        return sorted(members.values())

    @cached_property
    def gather_groups(self) -> list[list[int]]:
        """Groups that have one rank for every slot of a coarser DP index, in slot order.

        Fan-in: one group per (dest_dp, src_tp). Fan-out: one per (src_dp, dest_tp, cp, pp). Every
        rank lies in exactly one. There are no groups if the DP sizes are equal, or if neither
        divides the other, so that a finer index would share samples with two coarser ones.
        """
        if self.direction is BridgeDirection.EQUAL or not self.divides:
            return []
        fan_out = self.direction is BridgeDirection.FAN_OUT
        finer, atoms = (self.dest, self.consumes) if fan_out else (self.src, self.encodes)
        groups = defaultdict(list)
        for rank in sorted(finer, key=lambda rank: (atoms(rank).start, rank)):
            at = finer[rank]
            groups[atoms(rank).start // self.scale, at.tp, at.cp, at.pp].append(rank)
        return [groups[key] for key in sorted(groups)]


def bridge_topology(src_grid: HyperCommGrid, dest_grid: HyperCommGrid) -> BridgeTopology:
    """Read both grids, and decide which source DP index encodes which samples.

    Raises:
        ValueError: the grids span different ranks; a grid lacks ``tp`` or ``dp``, or has a dim
            other than tp, cp, dp, pp with a size above 1; or the source has CP or PP.
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
                f"src {dim.upper()} must be 1, got {src_sizes[dim]}: the bridge takes rows from "
                f"ranks that hold whole samples; give those ranks to dp or tp"
            )
    src, dest = _coordinates(src_grid), _coordinates(dest_grid)
    sizes = src_sizes["dp"], dest_sizes["dp"]
    ranks = [(src[rank].dp, at.dp, at.pp == 0) for rank, at in dest.items()]
    return BridgeTopology(src, dest, *sizes, assign_parts(*sizes, ranks))


def _run(index: int, length: int) -> range:
    return range(index * length, (index + 1) * length)


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
