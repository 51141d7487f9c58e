# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows each rank of a bridge has, ends with, and takes from whom; plain data, no processes.

A *block* is the ranks that share one DP index of the coarser side; *members* are its ranks by
index. The *rows* of a block are its samples' embeddings in batch order, cut into ``scale``
*slots*, one for each of its DP indices on the finer side:

============  ====================  ==========================================
direction     source member has     destination member ends with (stage 0 only)
============  ====================  ==========================================
fan-in        its slot              all rows
fan-out       all rows              its slot
equal         all rows (one slot)   all rows
============  ====================  ==========================================

Backward the two columns change places. There a row's gradient is non-zero only on the destination
CP rank that owns the row's token; the destination's TP ranks have replicas of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.models.mimo.comm.bridge_topology import BridgeDirection, BridgeTopology

NOBODY = -1


@dataclass(frozen=True, eq=False)
class BridgeRoute:
    """One member's share of one crossing. Places are int64 row indices into its own tensors.

    Attributes:
        send_places: rows that it sends, grouped by the member that takes them.
        send_splits: number of rows for each member; 0 for itself.
        recv_places: where received rows go, grouped by the member that gives them.
        recv_splits: number of rows from each member; 0 for itself.
        kept_from, kept_to: rows that it takes from itself, and where they go.
        rows: rows that it ends with.
        copies: addends of each row; copy c of row r is received at place ``c * rows + r``.
        crosses: members take part in a collective, whether or not they have rows to move.
    """

    send_places: Tensor
    send_splits: tuple[int, ...]
    recv_places: Tensor
    recv_splits: tuple[int, ...]
    kept_from: Tensor
    kept_to: Tensor
    rows: int
    copies: int
    crosses: bool

    def to(self, device: torch.device | str) -> BridgeRoute:
        """The same route with its index tensors on ``device``, copied without waiting."""
        names = ("send_places", "recv_places", "kept_from", "kept_to")
        return replace(self, **{n: getattr(self, n).to(device, non_blocking=True) for n in names})


@dataclass(frozen=True, eq=False)
class Crossing:
    """One way over the bridge within one block, before any row is counted.

    Rows fall into *parts*: rows of a part are given by the same members. The part of a row is its
    CP owner, and its slot as well where ``by_slot``.

    Attributes:
        before, after: slots that each member has, and ends with.
        gives: the part that each member can give, or NOBODY.
        by_slot: members give one slot only.
        owners: number of CP ranks that may own a row.
    """

    before: tuple[range, ...]
    after: tuple[range, ...]
    gives: tuple[int, ...]
    by_slot: bool
    owners: int

    @cached_property
    def giver(self) -> np.ndarray:
        """Member from which each member takes each part, int64 [members, parts]; else NOBODY.

        A member that has the part takes it from itself. The others take turns among those who have
        it, so that replicas share the sending evenly.
        """
        gives = np.array(self.gives)
        takes = np.array([len(slots) > 0 for slots in self.after])
        giver = np.full((len(gives), gives.max() + 1), NOBODY)
        for part in range(giver.shape[1]):
            have = np.flatnonzero(gives == part)
            lack = np.flatnonzero(takes & (gives != part))
            giver[have, part] = have
            giver[lack, part] = have[np.arange(len(lack)) % len(have)]
        return giver

    @cached_property
    def crosses(self) -> bool:
        """Whether any member takes from another; the same in every block."""
        others = self.giver != np.arange(len(self.gives))[:, None]
        return bool((others & (self.giver != NOBODY)).any())

    def route(
        self, member: int, slot_rows: Sequence[int], owner: Tensor | None = None
    ) -> BridgeRoute:
        """Plan one member's share for one batch.

        Args:
            member: whose share.
            slot_rows: number of rows of each slot.
            owner: int64 [rows of the block], the CP rank whose copy of the row counts; ``None``
                takes the sum over all CP ranks' copies.
        """
        bounds = [0, *accumulate(slot_rows)]
        parts = self._parts(slot_rows, owner)
        copies = len(parts)

        wanted = _rows(self.after[member], bounds)
        count = wanted.stop - wanted.start
        givers = torch.from_numpy(self.giver[member])[parts[:, wanted].flatten()]
        places = givers.argsort(stable=True)
        kept = givers[places] == member
        kept_to, recv_places = places[kept], places[~kept]
        recv_splits = givers[recv_places].bincount(minlength=len(self.gives))

        first = _rows(self.before[member], bounds).start
        sent = [places.new_empty(0)] * len(self.gives)
        for taker in self._takers(member):
            rows = _rows(self.after[taker], bounds)
            hits = (parts[:, rows] == self.gives[member]).nonzero()[:, 1]
            sent[taker] = hits + (rows.start - first)
        return BridgeRoute(
            send_places=torch.cat(sent),
            send_splits=tuple(len(rows) for rows in sent),
            recv_places=recv_places,
            recv_splits=tuple(recv_splits.tolist()),
            kept_from=kept_to % max(count, 1) + (wanted.start - first),
            kept_to=kept_to,
            rows=count,
            copies=copies,
            crosses=self.crosses,
        )

    def received_rows(self, slot_rows: Sequence[int], owner: Tensor | None = None) -> list[int]:
        """Rows that each member receives from others; times a row's bytes, its traffic."""
        members = range(len(self.gives))
        return [sum(self.route(m, slot_rows, owner).recv_splits) for m in members]

    def _parts(self, slot_rows: Sequence[int], owner: Tensor | None) -> Tensor:
        """Part of each copy of each row, int64 [copies, rows]."""
        counts = torch.tensor(slot_rows, dtype=torch.int64)
        slot = torch.arange(len(slot_rows)).repeat_interleave(counts)
        copy_owner = torch.arange(self.owners)[:, None] if owner is None else owner[None]
        return (slot if self.by_slot else torch.zeros_like(slot)) * self.owners + copy_owner

    def _takers(self, member: int) -> list[int]:
        """The other members that take ``member``'s part from it."""
        if self.gives[member] == NOBODY:
            return []
        takers = np.flatnonzero(self.giver[:, self.gives[member]] == member)
        return takers[takers != member].tolist()


class BlockPlan(NamedTuple):
    """Both ways over the bridge within one block."""

    forward: Crossing
    backward: Crossing


def plan_block(topology: BridgeTopology, members: Sequence[int]) -> BlockPlan:
    """Plan the crossings of one block.

    Args:
        topology: positions of all ranks.
        members: global ranks of one of ``topology.blocks``, in the order of the process group.
    """
    fan_in = topology.direction is BridgeDirection.FAN_IN
    fan_out = topology.direction is BridgeDirection.FAN_OUT
    every_slot, no_slot = range(topology.scale), range(0)
    slots = [topology.slot(rank) for rank in members]
    dest = [topology.dest[rank] for rank in members]
    own = [range(slot, slot + 1) for slot in slots]

    held = tuple(own if fan_in else [every_slot] * len(members))
    wanted = own if fan_out else [every_slot] * len(members)
    consumed = tuple(rows if at.pp == 0 else no_slot for rows, at in zip(wanted, dest, strict=True))
    cp = topology.dest_cp
    return BlockPlan(
        forward=Crossing(
            before=held,
            after=consumed,
            gives=tuple(slot if fan_in else 0 for slot in slots),
            by_slot=fan_in,
            owners=1,
        ),
        backward=Crossing(
            before=consumed,
            after=held,
            gives=tuple(
                (slot if fan_out else 0) * cp + at.cp if at.pp == 0 else NOBODY
                for slot, at in zip(slots, dest, strict=True)
            ),
            by_slot=fan_out,
            owners=cp,
        ),
    )


def _rows(slots: range, bounds: list[int]) -> slice:
    return slice(bounds[slots.start], bounds[slots.stop])
