# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of a recurrence over contiguous shards: which ranks' states and last tokens reach a rank."""

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

from megatron.core.token_layout.device_copy import copied_to
from megatron.core.token_layout.padded_lengths import PaddedLengths
from megatron.core.token_layout.route import Route


class Halo(NamedTuple):
    """The ``reach`` tokens before a rank's first, seen by a causal window of ``reach`` + 1 tokens.

    Attributes:
        kept: number of a rank's last tokens that halos are made of: ``reach``, or its whole shard
            if that is less.
        route: from these tokens to the halo, with zeros where the rank's first sample has no token.
        adjoint: route of the halo's gradient back to these tokens.
    """

    kept: int
    route: Route
    adjoint: Route


@dataclass(frozen=True, eq=False)
class RecurrencePlan:
    """One rank's part in a recurrence over samples that lie contiguously on the CP ranks.

    Plain data, made on the host once per batch; index tensors lie on ``device``.

    Attributes:
        lengths: samples of the batch. Padding belongs to its sample and follows its tokens.
        cp_size: number of ranks that hold equal runs of the whole token stream.
        rank: this rank.
        device: device of the batch's tensors.
    """

    lengths: PaddedLengths
    cp_size: int
    rank: int
    device: torch.device

    @cached_property
    def shard_size(self) -> int:
        """Tokens of each rank."""
        return self.lengths.total // self.cp_size

    @cached_property
    def _ends(self) -> list[int]:
        """End of each sample that is not empty."""
        return [*dict.fromkeys(accumulate(length for length in self.lengths.padded if length))]

    def _sample(self, token: int) -> int:
        return bisect_right(self._ends, token)

    @cached_property
    def continues(self) -> tuple[bool, ...]:
        """Whether each rank's first token continues the sample of the token before it."""
        firsts = [rank * self.shard_size for rank in range(self.cp_size)]
        return tuple(t > 0 and self._sample(t - 1) == self._sample(t) for t in firsts)

    @cached_property
    def crosses(self) -> tuple[bool, ...]:
        """Whether each rank's tokens are all of one sample, so that states pass through."""
        size = self.shard_size
        return tuple(
            self._sample(rank * size) == self._sample((rank + 1) * size - 1)
            for rank in range(self.cp_size)
        )

    @property
    def is_local(self) -> bool:
        """Whether no sample spans two ranks, so that all ranks skip the collectives."""
        return not any(self.continues)

    def ranks_before(self) -> range:
        """The ranks, ascending, whose tokens make up the state that enters this one."""
        first = end = self.rank
        while self.continues[first]:
            first -= 1
            if not self.crosses[first]:
                break
        return range(first, end)

    def ranks_after(self) -> range:
        """The ranks, ascending, that the state leaving this one reaches."""
        start = last = self.rank
        while last + 1 < self.cp_size and self.continues[last + 1]:
            last += 1
            if not self.crosses[last]:
                break
        return range(start + 1, last + 1)

    @cached_property
    def bounds(self) -> list[int]:
        """Boundaries of the samples within this rank's shard, from 0 to the shard's size."""
        first = self.rank * self.shard_size
        inside = (end - first for end in self._ends)
        return [0, *(b for b in inside if 0 < b < self.shard_size), self.shard_size]

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
        """Sample of each token, from 0 on each rank, int32 [1, S/cp]; None for a single sample."""
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
        size, ranks = self.shard_size, range(self.cp_size)
        kept = min(reach, size)
        seen = [
            [
                t
                for t in range(max(0, first - reach), first)
                if self._sample(t) == self._sample(first)
            ]
            for first in (rank * size for rank in ranks)
        ]
        own, last = self.rank * size - reach, (self.rank + 1) * size - kept
        taken = [[t - own for t in seen[self.rank] if t // size == giver] for giver in ranks]
        given = [[t - last for t in seen[taker] if t // size == self.rank] for taker in ranks]
        copies: Counter[int] = Counter()
        returned = []  # places of gradients; those of a token that several ranks take add up
        for tokens in given:
            returned.append([copies[token] * kept + token for token in tokens])
            copies.update(tokens)
        is_local, addends = not any(seen), max(copies.values(), default=1)
        route = Route.of(self.rank, given, taken, size=reach, is_local=is_local)
        adjoint = Route.of(
            self.rank, taken, returned, size=kept, is_local=is_local, addends=addends
        )
        return Halo(kept, route.to(self.device), adjoint.to(self.device))

    def head_seq_idx(self, reach: int) -> Tensor | None:
        """Sample of each token of a halo of ``reach`` tokens and of this rank's first ``reach``.

        Returns:
            int32 ``[1, 2 reach]`` (shorter for a smaller shard), with the halo in sample 0; None if
            all tokens are of one sample.
        """
        found = vars(self).setdefault("_head_seq_idx", {})
        if reach not in found:
            is_one = self.bounds[1] >= min(reach, self.shard_size)
            found[reach] = None if is_one else F.pad(self.seq_idx[:, :reach], (reach, 0))
        return found[reach]


@lru_cache(maxsize=64)
def plan_recurrence(
    lengths: PaddedLengths, cp_size: int, rank: int, device: torch.device
) -> RecurrencePlan:
    """Plan ``rank``'s part; equal arguments return the same plan object, with its cached tensors.

    Raises:
        ValueError: ``cp_size`` does not divide the tokens, or a rank would have none.
    """
    if lengths.total % cp_size or lengths.total < cp_size:
        raise ValueError(
            f"a recurrence over cp={cp_size} needs a padded total that is a multiple of {cp_size} "
            f"and not 0, got {lengths.total}; pad the last sample"
        )
    return RecurrencePlan(lengths, cp_size, rank, device)
