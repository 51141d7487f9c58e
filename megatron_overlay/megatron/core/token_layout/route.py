# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of an exchange of rows between ranks, e.g. of tokens between two token layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.token_layout.device_copy import copied_to
from megatron.core.token_layout.layouts import TokenLayout


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

    Args:
        source, destination: layouts of one batch on the same ranks.
    """
    size, ranks = source.shard_size, source.cp_size
    goes_to = destination.places[source.tokens[group_rank]]
    origins = source.places[destination.tokens]  # places before, of all ranks' tokens
    stay = origins // max(size, 1) == torch.arange(ranks).unsqueeze(1)
    comes_from = origins[group_rank]
    to_rank, from_rank = goes_to // max(size, 1), comes_from // max(size, 1)

    send_places = to_rank.argsort(stable=True)
    recv_places = comes_from.argsort()
    stays = to_rank[send_places] == group_rank
    arrives = from_rank[recv_places] != group_rank
    kept_from = send_places[stays]
    return Route(
        send_places=send_places[~stays],
        send_splits=_splits(to_rank, ranks, group_rank),
        recv_places=recv_places[arrives],
        recv_splits=_splits(from_rank, ranks, group_rank),
        kept_from=kept_from,
        kept_to=goes_to[kept_from] - group_rank * size,
        size=size,
        is_local=bool(stay.all()),
    )


def _splits(peer: Tensor, ranks: int, group_rank: int) -> tuple[int, ...]:
    counts = peer.bincount(minlength=ranks)
    counts[group_rank] = 0
    return tuple(counts.tolist())
