# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that the bridge moves in a step of equal samples, from the bridge's own plans."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.plan import NOBODY, Crossing, plan_block
from megatron.core.models.mimo.bridge.topology import BridgeTopology, bridge_topology
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator


class Bridge(NamedTuple):
    """The bridge between two modules.

    Attributes:
        topology: what each rank encodes and consumes; None if modules are non-colocated.
        blocks: groups of ranks that exchange rows only among themselves.
        forward, backward: rows that one rank sends another in a step, float64 [from, to]; rows that
            stay on their rank are left out.
    """

    topology: BridgeTopology | None
    blocks: Sequence[Sequence[int]]
    forward: coo_array
    backward: coo_array


def leaving(way: coo_array, gpus_per_node: int) -> float:
    """Return the share of the rows that leave a node."""
    leaves = way.row // gpus_per_node != way.col // gpus_per_node
    return float(way.data[leaves].sum() / way.sum()) if way.nnz else 0.0


def colocated_bridge(encoder: HyperCommGrid, language: HyperCommGrid, rows: float) -> Bridge:
    """Return the bridge of colocated modules.

    All runs of the batch have equally many rows, as a mean if they are not whole tiles. A row's
    gradient is on the CP rank that owns its token, and all CP ranks own equally many rows.

    Args:
        rows: number of rows of the batch.
    """
    topology = bridge_topology(encoder, language)
    plans = [plan_block(topology, block) for block in topology.blocks]
    found = {}  # most blocks are alike
    ways = []
    for crossings in zip(*plans, strict=True):
        moves = []
        for block, crossing in zip(topology.blocks, crossings, strict=True):
            key = crossing.before, crossing.after, crossing.copy
            found[key] = found.get(key) or _moves(crossing)
            givers, takers, atoms = found[key]
            ranks = np.array(block)
            moves.append((ranks[givers], ranks[takers], atoms))
        givers, takers, atoms = map(np.concatenate, zip(*moves, strict=True))
        ways.append(_matrix(givers, takers, atoms * rows / topology.atoms, encoder.size))
    return Bridge(topology, topology.blocks, *ways)


def _moves(crossing: Crossing) -> tuple[np.ndarray, ...]:
    """Return giver and taker of every message, as members of the block, and its size in atoms."""
    members = np.arange(len(crossing.before))[:, None, None]
    moved = (crossing.giver != NOBODY) & (crossing.giver != members)
    givers, takers = crossing.giver[moved], np.nonzero(moved)[0]
    return givers, takers, np.full(len(givers), 1 / crossing.owners)


def non_colocated_bridge(encoder: HyperCommGrid, language: HyperCommGrid, rows: float) -> Bridge:
    """Return Megatron's bridge of non-colocated modules, from one rank of each DP index to another.

    A broadcast then gives a copy to each rank of a stage with the same DP index; it is not counted.

    Args:
        rows: number of rows of the batch.
    """
    bridge = BridgeCommunicator.__new__(BridgeCommunicator)  # its __init__ makes process groups
    bridge.src_grid, bridge.dest_grid = encoder, language
    bridge.current_rank, bridge.comm_map = NOBODY, {}
    senders, _ = bridge.get_leader_rank(bridge.src_grid, is_src=True)
    receivers, _ = bridge.get_leader_rank(bridge.dest_grid, is_src=False)
    bridge.build_comm_map(senders, receivers)
    pairs = [(rank, to) for rank in senders for to in bridge.comm_map[rank].send_to_ranks]
    each, world = np.full(len(pairs), rows / len(pairs)), language.rank_offset + language.size
    forward = _matrix(*np.array(pairs).T, each, world)
    of_rank = connected_components(forward)[1]
    blocks = [np.flatnonzero(of_rank == of_rank[rank]).tolist() for rank in senders]
    unique = [block for number, block in enumerate(blocks) if block not in blocks[:number]]
    return Bridge(None, unique, forward, forward.T)


def _matrix(givers: np.ndarray, takers: np.ndarray, rows: np.ndarray, world: int) -> coo_array:
    matrix = coo_array((rows, (givers, takers)), shape=(world, world))
    matrix.sum_duplicates()
    return matrix
