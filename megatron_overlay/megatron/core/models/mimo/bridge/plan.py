# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan which rows each rank of a bridge takes from which other rank; plain data, no processes.

*Members* are the ranks of one block of the topology, by index. *Rows* are samples' embeddings in
batch order; an *atom* is the rows of one run of samples. In the forward, a member starts with the
atoms that it encodes and ends with those that it consumes (none on later pipeline stages); in the
backward it is the other way round. A row's gradient is non-zero only on the destination CP rank
that owns the row's token; the destination's TP ranks have replicas of it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron.core.models.mimo.bridge.topology import BridgeTopology
from megatron.core.token_layout.route import Route, by_rank

NOBODY = -1


class AtomRows(NamedTuple):
    """Rows of consecutive atoms.

    Args:
        counts: number of rows of each atom.
        owners: int64 [rows], the destination CP rank whose copy of each row is taken; None to take
            the sum of all CP ranks' copies.
    """

    counts: Sequence[int]
    owners: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Crossing:
    """One direction of the bridge within one block, in atoms, before rows are counted.

    Attributes:
        before, after: atoms with which each member starts and ends, numbered within the block.
        copy: index, 0 … owners - 1, of the copy of its rows that each member has and gives.
        owners: number of different copies of a row: the number of CP ranks, or 1.
    """

    before: tuple[range, ...]
    after: tuple[range, ...]
    copy: tuple[int, ...]
    owners: int

    @cached_property
    def giver(self) -> np.ndarray:
        """Member from which each member takes each copy of an atom, int64 [members, atoms, owners].

        NOBODY where a member takes no such copy. A member that has a copy takes its own; the others
        take turns among the members that have it, so that replicas share the sending evenly.
        """
        atoms = max(run.stop for run in chain(self.before, self.after))
        has, takes = (_membership(runs, atoms) for runs in (self.before, self.after))
        giver = np.full((len(self.before), atoms, self.owners), NOBODY)
        turns: dict[tuple[int, ...], int] = defaultdict(int)
        for atom in range(atoms):
            for copy in range(self.owners):
                gives = has[:, atom] & (np.array(self.copy) == copy)
                have, lack = np.flatnonzero(gives), np.flatnonzero(takes[:, atom] & ~gives)
                keeps = np.flatnonzero(takes[:, atom] & gives)
                giver[keeps, atom, copy] = keeps
                turn = turns[tuple(have)]
                giver[lack, atom, copy] = have[(turn + np.arange(len(lack))) % len(have)]
                turns[tuple(have)] += len(lack)
        return giver

    @cached_property
    def crosses(self) -> bool:
        """Whether any member takes a row from another member."""
        others = self.giver != np.arange(len(self.before))[:, None, None]
        return bool((others & (self.giver != NOBODY)).any())

    def route(self, member: int, before: AtomRows, after: AtomRows) -> Route:
        """Plan one member's part in the exchange of one batch."""
        atom, members = _atom_of_rows(self.after[member], after.counts), len(self.before)
        if after.owners is None:
            givers = self.giver[member][atom].T  # [copies, rows]
        else:
            givers = self.giver[member][atom, after.owners][None]
        return Route.of(
            member,
            self._sent(member, before),
            by_rank(givers.flatten(), members),
            size=len(atom),
            addends=len(givers),
            is_local=not self.crosses,
        )

    def _sent(self, member: int, before: AtomRows) -> list[np.ndarray]:
        """Return the places of the rows that each member takes from ``member``, ascending."""
        atom = _atom_of_rows(self.before[member], before.counts)
        mine = np.ones(len(atom), dtype=bool)
        if self.owners > 1 and before.owners is not None:
            mine = before.owners == self.copy[member]
        takes = self.giver[:, :, self.copy[member]] == member
        sent = [np.zeros(0, dtype=np.int64)] * len(self.before)
        for taker in np.flatnonzero(takes.any(axis=1)):
            sent[taker] = np.flatnonzero(takes[taker][atom] & mine)
        return sent


class BlockPlan(NamedTuple):
    """Both directions of the bridge within one block."""

    forward: Crossing
    backward: Crossing

    def routes(self, member: int, encoded: AtomRows, consumed: AtomRows) -> tuple[Route, Route]:
        """Return a member's forward and backward route over the bridge.

        Args:
            consumed: rows of the atoms that the member's destination DP index consumes; not read on
                later pipeline stages, which consume none.
        """
        if not self.forward.after[member]:
            consumed = AtomRows((), None if consumed.owners is None else consumed.owners[:0])
        forward = self.forward.route(member, AtomRows(encoded.counts), AtomRows(consumed.counts))
        return forward, self.backward.route(member, consumed, encoded)


def plan_block(topology: BridgeTopology, members: Sequence[int]) -> BlockPlan:
    """Plan the crossings of one block.

    Args:
        members: global ranks of one of ``topology.blocks``, in the order of the process group.
    """
    atoms = sorted({atom for rank in members for atom in topology.encodes(rank)})
    place = {atom: number for number, atom in enumerate(atoms)}

    def within_block(run: range) -> range:
        return range(place[run.start], place[run.start] + len(run))

    dest = [topology.dest[rank] for rank in members]
    encoded = tuple(within_block(topology.encodes(rank)) for rank in members)
    consumed = tuple(
        within_block(topology.consumes(rank)) if at.pp == 0 else range(0)
        for rank, at in zip(members, dest, strict=True)
    )
    return BlockPlan(
        forward=Crossing(encoded, consumed, copy=(0,) * len(members), owners=1),
        backward=Crossing(
            consumed, encoded, copy=tuple(at.cp for at in dest), owners=topology.dest_cp
        ),
    )


def _membership(runs: Sequence[range], atoms: int) -> np.ndarray:
    """Return whether each run holds each atom, bool [runs, atoms]."""
    starts, stops = (np.array([getattr(run, end) for run in runs]) for end in ("start", "stop"))
    atom = np.arange(atoms)
    return (atom >= starts[:, None]) & (atom < stops[:, None])


def _atom_of_rows(run: range, counts: Sequence[int]) -> np.ndarray:
    """Return the atom of each row of a run of atoms, int64 [rows]."""
    return np.repeat(np.arange(run.start, run.stop), np.array(counts, dtype=np.int64))
