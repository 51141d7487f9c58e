# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of a recurrence under context parallelism: which ranks' states and last tokens reach a rank.

A *chain* of tokens is cut into equal *links*. On contiguous tokens the whole token stream is one
chain, and rank r holds link r of cp. On zigzag tokens each sample is a chain, and rank r holds
links r and 2·cp-1-r of 2·cp. All chains are alike, and a recurrence has links as rows of a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.token_layout.layouts import check_zigzag_lengths
from megatron.core.token_layout.padded_lengths import PaddedLengths, copied_to
from megatron.core.token_layout.route import Route


class Halo(NamedTuple):
    """The ``reach`` tokens before each of a rank's links, seen by a window of ``reach`` + 1 tokens.

    Attributes:
        kept: number of a link's last tokens that halos are made of: ``reach``, or the whole link if
            that is less.
        route: from these tokens, link after link, to the halos, with zeros where the sample of a
            link's first token has no token.
        adjoint: route of the halos' gradient back to these tokens.
    """

    kept: int
    route: Route
    adjoint: Route


@dataclass(frozen=True, eq=False)
class RecurrencePlan:
    """One rank's part in a recurrence over samples whose tokens lie on the CP ranks.

    Plain data, made on the host once per batch; index tensors lie on ``device``.

    Attributes:
        lengths: samples of the batch. Padding belongs to its sample and follows its tokens.
        cp_size: number of ranks that hold equally many tokens.
        parts: number of links of a chain that each rank holds: 1 of contiguous tokens, 2 of zigzag
            tokens, whose samples are all of one length.
    """

    lengths: PaddedLengths
    cp_size: int
    rank: int
    device: torch.device
    parts: int = 1

    @property
    def is_zigzag(self) -> bool:
        """Whether the recurrence takes zigzag tokens."""
        return self.parts == 2

    @cached_property
    def shard_size(self) -> int:
        """Tokens of each rank."""
        return self.lengths.total // self.cp_size

    @cached_property
    def link_size(self) -> int:
        """Tokens of each link."""
        return self._ends[-1] // (self.parts * self.cp_size)

    @cached_property
    def chain(self) -> list[tuple[int, int]]:
        """Rank that holds each link, and the link's number among those of the rank."""
        there = [(rank, 0) for rank in range(self.cp_size)]
        return there if self.parts == 1 else there + [(rank, 1) for rank, _ in reversed(there)]

    @cached_property
    def own(self) -> list[int]:
        """Links that this rank holds."""
        return [link for link, (rank, _) in enumerate(self.chain) if rank == self.rank]

    @cached_property
    def _ends(self) -> list[int]:
        """End of each sample that is not empty, in its chain."""
        lengths = [length for length in self.lengths.padded if length]
        return [*accumulate(lengths)] if self.parts == 1 else lengths[:1]

    def _sample(self, token: int) -> int:
        return bisect_right(self._ends, token)

    @cached_property
    def continues(self) -> tuple[bool, ...]:
        """Whether each link's first token continues the sample of the token before it."""
        firsts = [link * self.link_size for link in range(len(self.chain))]
        return tuple(t > 0 and self._sample(t - 1) == self._sample(t) for t in firsts)

    @cached_property
    def crosses(self) -> tuple[bool, ...]:
        """Whether each link's tokens are all of one sample, so that states pass through."""
        size = self.link_size
        return tuple(
            self._sample(link * size) == self._sample((link + 1) * size - 1)
            for link in range(len(self.chain))
        )

    @property
    def is_local(self) -> bool:
        """Whether no sample spans two links, so that all ranks skip the collectives."""
        return not any(self.continues)

    def links_before(self) -> range:
        """The links, ascending, whose tokens make up the state that enters this rank's last one."""
        first = end = self.own[-1]
        while self.continues[first]:
            first -= 1
            if not self.crosses[first]:
                break
        return range(first, end)

    def links_after(self) -> range:
        """The links, ascending, that the state leaving this rank's first one reaches."""
        start = last = self.own[0]
        while last + 1 < len(self.chain) and self.continues[last + 1]:
            last += 1
            if not self.crosses[last]:
                break
        return range(start + 1, last + 1)

    @cached_property
    def bounds(self) -> list[int]:
        """Boundaries of the samples within each of this rank's links, from 0 to a link's size."""
        first = self.own[0] * self.link_size
        inside = (end - first for end in self._ends)
        return [0, *(b for b in inside if 0 < b < self.link_size), self.link_size]

    @cached_property
    def cu_seqlens_host(self) -> Tensor:
        """:attr:`bounds` on the host, int32 [samples here + 1]."""
        return torch.tensor(self.bounds, dtype=torch.int32)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """:attr:`bounds` on the device, int32 [samples here + 1]."""
        return copied_to(self.device, self.cu_seqlens_host)

    @cached_property
    def seq_idx(self) -> Tensor | None:
        """Sample of each token of a link, from 0, int32 [1, L]; None for a single sample."""
        if len(self.bounds) == 2:
            return None
        lengths = torch.tensor(self.bounds).diff()
        index = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)
        return copied_to(self.device, index.unsqueeze(0))

    def halo(self, reach: int) -> Halo:
        """The halo of a causal convolution of width ``reach`` + 1; cached."""
        halos = vars(self).setdefault("_halos", {})
        if reach not in halos:
            halos[reach] = self._make_halo(reach)
        return halos[reach]

    def _make_halo(self, reach: int) -> Halo:
        size, ranks = self.link_size, range(self.cp_size)
        kept = min(reach, size)
        # Places in messages, by giver and taker: among kept tokens, in halos, and of gradients,
        # where those of a token that several links take add up.
        given, taken, returned = ([[[] for _ in ranks] for _ in ranks] for _ in range(3))
        copies: Counter[tuple[int, int]] = Counter()
        for link, (taker, part) in enumerate(self.chain):
            first = link * size
            for token in range(max(0, first - reach), first):
                if self._sample(token) == self._sample(first):
                    giver, its_part = self.chain[token // size]
                    place = its_part * kept + token % size - (size - kept)
                    given[giver][taker].append(place)
                    taken[giver][taker].append(part * reach + reach - first + token)
                    copy = copies[giver, place]
                    returned[giver][taker].append(copy * self.parts * kept + place)
                    copies[giver, place] += 1
        rank, is_local = self.rank, not copies
        addends = max((n for (giver, _), n in copies.items() if giver == rank), default=1)
        taken_here = [of_giver[rank] for of_giver in taken]
        route = Route.of(rank, given[rank], taken_here, size=self.parts * reach, is_local=is_local)
        adjoint = Route.of(
            *(rank, taken_here, returned[rank]),
            size=self.parts * kept,
            is_local=is_local,
            addends=addends,
        )
        return Halo(kept, route.to(self.device), adjoint.to(self.device))

    def head_seq_idx(self, reach: int) -> Tensor | None:
        """Sample of each token of a halo of ``reach`` tokens and of a link's first ``reach``.

        Returns:
            int32 ``[1, 2 reach]`` (shorter for a smaller link), with the halo in sample 0; None if
            all tokens are of one sample.
        """
        found = vars(self).setdefault("_head_seq_idx", {})
        if reach not in found:
            is_one = self.bounds[1] >= min(reach, self.link_size)
            found[reach] = None if is_one else F.pad(self.seq_idx[:, :reach], (reach, 0))
        return found[reach]

    def by_link(self, shard: Tensor) -> Tensor:
        """Reshape this rank's tokens ``[B, S/cp, …]`` to its links, ``[B·links, L, …]``."""
        return shard.reshape(-1, self.link_size, *shard.shape[2:])

    def whole(self, links: Tensor) -> Tensor:
        """Reshape this rank's links to its tokens: the inverse of :meth:`by_link`."""
        return links.reshape(-1, self.shard_size, *links.shape[2:])

    def by_link_of_chain(self, gathered: Tensor) -> list[Tensor]:
        """Views ``[chains, …]`` for each link of a chain, of ``[cp, chains·parts, …]``."""
        by_part = gathered.unflatten(1, (-1, self.parts))
        return [by_part[rank, :, part] for rank, part in self.chain]

    def tokens_first(self, links: Tensor) -> Tensor:
        """Put tokens of links, ``[chains·parts, t, D]``, in the order of a halo's routes.

        Returns:
            ``[parts·t, chains, D]``.
        """
        return links.unflatten(0, (-1, self.parts)).permute(1, 2, 0, 3).flatten(0, 1)

    def links_first(self, tokens: Tensor) -> Tensor:
        """``[chains·parts, t, D]`` again: the inverse of :meth:`tokens_first`."""
        return tokens.unflatten(0, (self.parts, -1)).permute(2, 0, 1, 3).flatten(0, 1)


@lru_cache(maxsize=64)
def plan_recurrence(
    lengths: PaddedLengths, cp_size: int, rank: int, device: torch.device, is_zigzag: bool = False
) -> RecurrencePlan:
    """Plan ``rank``'s part; equal arguments return the same plan object, with its cached tensors.

    Args:
        is_zigzag: whether the tokens are zigzag before the recurrence. The plan is of zigzag tokens
            if all samples are of one length, else of contiguous tokens.

    Raises:
        ValueError: ``cp_size`` does not divide the tokens, a rank would have none, or zigzag tokens
            are of a sample that does not halve.
    """
    if lengths.total % cp_size or lengths.total < cp_size:
        raise ValueError(
            f"a recurrence over cp={cp_size} needs a padded total that is a multiple of {cp_size} "
            f"and not 0, got {lengths.total}; pad the last sample"
        )
    if is_zigzag:
        check_zigzag_lengths(lengths, cp_size)
    stays = is_zigzag and len({*lengths.padded} - {0}) == 1
    return RecurrencePlan(lengths, cp_size, rank, device, parts=2 if stays else 1)
