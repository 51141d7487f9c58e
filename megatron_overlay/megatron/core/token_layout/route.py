# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of an exchange of rows between ranks, e.g. of tokens between two token layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron.core.token_layout.layouts import TokenLayout
from megatron.core.token_layout.padded_lengths import copied_to


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's part in an exchange of rows among the ranks of a group.

    Index tensors are int64 and hold places in this rank's tensors. Rows whose rank does not change
    are copied locally and never enter the collective.

    Attributes:
        send_places: places of the rows that the rank sends, grouped by destination group rank.
        send_splits: number of rows for each group rank; 0 for this one.
        recv_places: places of the rows that the rank receives, grouped by source group rank.
        recv_splits: number of rows from each group rank; 0 for this one.
        kept_from: places, before the exchange, of the rows that stay.
        kept_to: places of the same rows after the exchange.
        size: number of rows that the rank ends with.
        is_local: whether no rank sends anything, so that all ranks skip the collective.
        addends: number of addends of each resulting row; addend a of row r has the place
            ``a * size + r``. A place that is neither received nor kept is zero.
    """

    send_places: Tensor
    send_splits: tuple[int, ...]
    recv_places: Tensor
    recv_splits: tuple[int, ...]
    kept_from: Tensor
    kept_to: Tensor
    size: int
    is_local: bool
    addends: int = 1

    @classmethod
    def of(
        cls,
        group_rank: int,
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        **others: int | bool,
    ) -> Route:
        """Route from the places of the rows that go to each group rank, and come from each.

        Args:
            group_rank: this rank; its own entries are the rows that stay.
            sent, received: places, in the order of a message.
            others: ``size``, ``is_local`` and ``addends``.
        """
        out, into = (
            [np.asarray(rows, dtype=np.int64) for rows in places] for places in (sent, received)
        )
        kept_from, kept_to = out[group_rank], into[group_rank]
        out[group_rank] = into[group_rank] = np.zeros(0, dtype=np.int64)
        return cls(
            send_places=torch.from_numpy(np.concatenate(out)),
            send_splits=tuple(map(len, out)),
            recv_places=torch.from_numpy(np.concatenate(into)),
            recv_splits=tuple(map(len, into)),
            kept_from=torch.from_numpy(kept_from),
            kept_to=torch.from_numpy(kept_to),
            **others,
        )

    def reversed(self) -> Route:
        """The inverse, and so the adjoint, of a route that permutes equal shards."""
        return Route(
            send_places=self.recv_places,
            send_splits=self.recv_splits,
            recv_places=self.send_places,
            recv_splits=self.send_splits,
            kept_from=self.kept_to,
            kept_to=self.kept_from,
            size=self.size,
            is_local=self.is_local,
        )

    def to(self, device: torch.device | str) -> Route:
        """The same route with its index tensors on ``device``, copied without waiting."""
        names = ("send_places", "recv_places", "kept_from", "kept_to")
        moved = {name: copied_to(device, getattr(self, name)) for name in names}
        return replace(self, **moved)


def plan_route(source: TokenLayout, destination: TokenLayout, group_rank: int) -> Route:
    """Plan ``group_rank``'s part of the exchange from ``source`` to ``destination``.

    Made on the host once per batch. A message has its rows in the sender's local order.
    """
    size, ranks = source.shard_size, torch.arange(source.cp_size)
    origins = source.places[destination.tokens]  # places before, of all ranks' tokens
    goes_to, comes_from = destination.places[source.tokens[group_rank]], origins[group_rank]
    return Route.of(
        group_rank,
        by_rank(goes_to.numpy() // max(size, 1), len(ranks)),
        by_rank(comes_from.numpy() // max(size, 1), len(ranks), comes_from.numpy().argsort()),
        size=size,
        is_local=bool((origins // max(size, 1) == ranks.unsqueeze(1)).all()),
    )


def by_rank(
    rank_of_row: np.ndarray, ranks: int, order: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the rows of each rank, in ascending order.

    Args:
        order: all rows in another order, sorted by rank.
    """
    order = rank_of_row.argsort(kind="stable") if order is None else order
    return np.split(order, np.bincount(rank_of_row, minlength=ranks).cumsum()[:-1])
