# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that the bridge moves in a step of equal samples, from the bridge's own plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.plan import NOBODY, Crossing, plan_block
from megatron.core.models.mimo.bridge.topology import BridgeTopology, bridge_topology
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator


class Flows(NamedTuple):
    """Rows that ranks send each other in one direction, as arrays of equal length.

    Rows that stay on their rank are left out.

    Attributes:
        givers, takers: int64, global ranks that send and receive each message.
        rows: float64, rows of each message.
    """

    givers: np.ndarray
    takers: np.ndarray
    rows: np.ndarray

    @property
    def total(self) -> float:
        """Rows of all messages together."""
        return float(self.rows.sum())

    def sent(self, world: int) -> np.ndarray:
        """Return the rows that each rank sends, float64 [world]."""
        return np.bincount(self.givers, self.rows, minlength=world)

    def received(self, world: int) -> np.ndarray:
        """Return the rows that each rank receives, float64 [world]."""
        return np.bincount(self.takers, self.rows, minlength=world)

    def leaving(self, gpus_per_node: int) -> float:
        """Return the share of the rows that leave a node."""
        leaves = self.givers // gpus_per_node != self.takers // gpus_per_node
        return float(self.rows[leaves].sum()) / self.total if self.total else 0.0


@dataclass(frozen=True)
class Bridge:
    """The bridge between two modules.

    Attributes:
        topology: what each rank encodes and consumes; None if modules are non-colocated.
        blocks: groups of ranks that exchange rows only among themselves.
        forward, backward: rows moved in a step.
    """

    topology: BridgeTopology | None
    blocks: list[list[int]]
    forward: Flows
    backward: Flows

    @property
    def ways(self) -> dict[str, Flows]:
        """Both directions by name."""
        return {"forward": self.forward, "backward": self.backward}


def colocated_bridge(encoder: HyperCommGrid, language: HyperCommGrid, rows: float) -> Bridge:
    """Return the bridge of colocated modules.

    All runs of the batch have equally many rows, as a mean if they are not whole tiles. A row's
    gradient is on the CP rank that owns its token, and all CP ranks own equally many rows.

    Args:
        rows: number of rows of the batch.
    """
    topology = bridge_topology(encoder, language)
    moves = {}
    found: tuple[list, list] = ([], [])
    for block in topology.blocks:
        plan = plan_block(topology, block)
        key = plan.forward.before, plan.forward.after, plan.backward.copy
        if key not in moves:  # most blocks are alike
            moves[key] = [_moves(way) for way in plan]
        for way, (givers, takers, share) in zip(found, moves[key], strict=True):
            ranks = np.array(block)
            way.append((ranks[givers], ranks[takers], share * rows / topology.atoms))
    forward, backward = (Flows(*map(np.concatenate, zip(*way, strict=True))) for way in found)
    return Bridge(topology, topology.blocks, forward, backward)


def _moves(crossing: Crossing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return giver and taker of every message, as members of the block, and its size in atoms."""
    members = np.arange(len(crossing.before))[:, None, None]
    taker, atom, copy = np.nonzero((crossing.giver != NOBODY) & (crossing.giver != members))
    pair = crossing.giver[taker, atom, copy] * len(members) + taker
    pairs, number = np.unique(pair, return_counts=True)
    return pairs // len(members), pairs % len(members), number / crossing.owners


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
    givers, takers = np.array(pairs).T
    each = np.full(len(pairs), rows / len(pairs))
    blocks = sorted(_joined(pairs))
    return Bridge(None, blocks, Flows(givers, takers, each), Flows(takers, givers, each))


def _joined(pairs: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the ranks of pairs that have the sender, or else the receiver, in common."""
    side = 0 if len({giver for giver, _ in pairs}) <= len({taker for _, taker in pairs}) else 1
    for shared in {pair[side] for pair in pairs}:
        yield sorted({rank for pair in pairs if pair[side] == shared for rank in pair})
