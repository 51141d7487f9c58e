# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Position of every rank on both sides of a bridge; plain data, no processes, any world size."""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.sample_ownership import assign_parts

DIMS = ("tp", "cp", "dp", "pp")

Axes = tuple[tuple[str, int], ...]
"""Names and sizes of a grid's dims, the fastest first."""


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
        parts: for each source DP index, the index of the one of ``src_dp`` equal runs of the batch
            that it encodes.
    """

    src: dict[int, Coordinates]
    dest: dict[int, Coordinates]
    src_dp: int
    dest_dp: int
    parts: tuple[int, ...]

    @property
    def atoms(self) -> int:
        """Number of atoms that the batch is cut into."""
        return math.lcm(self.src_dp, self.dest_dp)

    @cached_property
    def dest_cp(self) -> int:
        """CP size of the destination."""
        return 1 + max(at.cp for at in self.dest.values())

    @cached_property
    def dest_pp(self) -> int:
        """PP size of the destination."""
        return 1 + max(at.pp for at in self.dest.values())

    def encodes(self, rank: int) -> range:
        """Return the atoms that a rank encodes."""
        return atoms_of(self.parts[self.src[rank].dp], self.src_dp, self.dest_dp)

    def consumes(self, rank: int) -> range:
        """Return the atoms that a rank's destination DP index consumes, on the first stage."""
        return atoms_of(self.dest[rank].dp, self.dest_dp, self.src_dp)

    @cached_property
    def exchanges(self) -> bool:
        """Whether any row or gradient ever moves between ranks."""
        return self.dest_cp * self.dest_pp > 1 or any(
            self.encodes(rank) != self.consumes(rank) for rank in self.src
        )

    @cached_property
    def blocks(self) -> list[list[int]]:
        """Sets of ranks connected, directly or through others, by samples they encode or consume.

        No traffic leaves a block. Every rank encodes, so it lies in exactly one block.
        """
        # Imported here: upstream's scripts, which import this module, need not have SciPy.
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        runs = {run for rank in self.src for run in (self.encodes(rank), self.consumes(rank))}
        joined = [(run.start, atom) for run in runs for atom in run]
        joined += [
            (self.encodes(rank).start, self.consumes(rank).start)
            for rank, at in self.dest.items()
            if at.pp == 0
        ]
        edges = coo_array((np.ones(len(joined)), np.transpose(joined)), (self.atoms, self.atoms))
        _, block = connected_components(edges, directed=False)
        members = defaultdict(list)
        for rank in sorted(self.src):
            members[block[self.encodes(rank).start]].append(rank)
        return sorted(members.values())


def bridge_topology(src_grid: HyperCommGrid, dest_grid: HyperCommGrid) -> BridgeTopology:
    """Read both grids, of the same ranks, and decide which source DP index encodes which samples.

    Raises:
        ValueError: a grid has a dim other than tp, cp, dp, pp with a size above 1; or the source
            has CP or PP.
    """
    src_sizes = _checked_sizes("source", src_grid)
    _checked_sizes("destination", dest_grid)
    for dim in ("pp", "cp"):
        if src_sizes[dim] != 1:
            raise ValueError(
                f"src {dim.upper()} must be 1, got {src_sizes[dim]}: the bridge takes rows from "
                f"ranks that hold whole samples; give those ranks to dp or tp"
            )
    axes = [tuple(zip(grid.dim_names, grid.shape, strict=True)) for grid in (src_grid, dest_grid)]
    return _topology(*axes, src_grid.rank_offset)


@lru_cache(maxsize=8)  # the loader asks for the same topology as the model's bridge
def _topology(src_axes: Axes, dest_axes: Axes, rank_offset: int) -> BridgeTopology:
    src, dest = (_coordinates(axes, rank_offset) for axes in (src_axes, dest_axes))
    sizes = dict(src_axes)["dp"], dict(dest_axes)["dp"]
    ranks = [(src[rank].dp, at.dp, at.pp == 0) for rank, at in dest.items()]
    return BridgeTopology(src, dest, *sizes, assign_parts(*sizes, ranks))


def atoms_of(index: int, dp: int, other_dp: int) -> range:
    """Return the atoms of the ``index``-th of ``dp`` equal runs; the other side has ``other_dp``.

    There are lcm(dp, other_dp) atoms in all.
    """
    each = math.lcm(dp, other_dp) // dp
    return range(index * each, (index + 1) * each)


def _checked_sizes(side: str, grid: HyperCommGrid) -> dict[str, int]:
    sizes = dict.fromkeys(DIMS, 1) | dict(zip(grid.dim_names, grid.shape, strict=True))
    other = {dim: size for dim, size in sizes.items() if dim not in DIMS and size != 1}
    if other:
        raise ValueError(
            f"{side} grid has dims {other}, whose part in a batch is unknown; register expert dims "
            f"as a view"
        )
    return sizes


def _coordinates(axes: Axes, rank_offset: int) -> dict[int, Coordinates]:
    names, shape = zip(*axes, strict=True)
    size = math.prod(shape)
    places = np.unravel_index(np.arange(size), shape[::-1])
    index = dict.fromkeys(DIMS, np.zeros(size, dtype=int))
    index.update(zip(reversed(names), places, strict=True))
    columns = zip(*(index[dim].tolist() for dim in Coordinates._fields), strict=True)
    return {rank_offset + i: Coordinates(*at) for i, at in enumerate(columns)}
