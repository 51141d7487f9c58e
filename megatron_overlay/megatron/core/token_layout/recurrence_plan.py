# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of a recurrence over contiguous shards: which ranks' states and last tokens reach a rank."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.token_layout.device_copy import copied_to
from megatron.core.token_layout.padded_lengths import PaddedLengths


@dataclass(frozen=True, eq=False)
class Halo:
    """The ``reach`` tokens before a rank's first, seen by a causal window of ``reach`` + 1 tokens.

    Every rank offers its last ``kept`` tokens (``reach``, or its whole shard if that is less); the
    gathered tensor ``[cp · kept, ...]`` has them rank by rank.

    Attributes:
        take: row of the gathered tensor for each halo token, int64 [reach]; 0 if there is none.
        valid: 1 where the row is a token of the rank's first sample, else 0, int64 [reach].
        used_at: places, in the ranks' halos laid end to end ``[cp · reach]``, that hold a token
            of this rank, int64.
        token: index of each of these tokens among this rank's last ``kept`` tokens, int64.
        is_empty: whether no rank needs any token, so that all ranks skip the collective.
        is_whole: whether all rows that this rank takes are valid.
    """

    reach: int
    kept: int
    take: Tensor
    valid: Tensor
    used_at: Tensor
    token: Tensor
    is_empty: bool
    is_whole: bool


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
        size = self.shard_size
        kept = min(reach, size)
        take, valid, used_at, token = [0] * reach, [0] * reach, [], []
        for rank in range(self.cp_size):
            first = rank * size
            for place, seen in enumerate(range(first - reach, first)):
                if seen < 0 or self._sample(seen) != self._sample(first):
                    continue
                owner, kept_place = seen // size, seen % size - (size - kept)
                if rank == self.rank:
                    take[place], valid[place] = owner * kept + kept_place, 1
                if owner == self.rank:
                    used_at.append(rank * reach + place)
                    token.append(kept_place)
        is_whole = all(valid)
        indices = (
            copied_to(self.device, torch.tensor(values, dtype=torch.int64))
            for values in (take, valid, used_at, token)
        )
        return Halo(reach, kept, *indices, reach == 0 or self.is_local, is_whole)

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
