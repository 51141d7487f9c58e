# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts: the global tokens that each context-parallel (CP) rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron.core.token_layout.padded_lengths import PaddedLengths, copied_to


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The padded tokens of one batch that each CP rank holds; plain data, no process group.

    Attributes:
        lengths: samples of the batch, which number its tokens.
        tokens: global token at each place, int64 ``[cp, total/cp]``; row r is group rank r's
            shard in its local order. Every token occurs exactly once.
    """

    lengths: PaddedLengths
    tokens: Tensor

    @property
    def cp_size(self) -> int:
        """Number of ranks that the tokens are split over."""
        return self.tokens.size(0)

    @property
    def shard_size(self) -> int:
        """Number of tokens that each rank holds."""
        return self.tokens.size(1)

    @cached_property
    def places(self) -> Tensor:
        """Place of each global token in the rank-ordered concatenation, int64 [total]."""
        flat = self.tokens.flatten()
        return torch.empty_like(flat).scatter_(0, flat, torch.arange(len(flat), device=flat.device))

    def to(self, device: torch.device | str) -> TokenLayout:
        """The same layout with its index table on ``device``; copied once, without waiting."""
        if self.tokens.device == torch.device(device):
            return self
        copies = vars(self).setdefault("_copies", {})
        if device not in copies:
            copies[device] = replace(self, tokens=copied_to(device, self.tokens))
        return copies[device]

    def over_tensor_ranks(self, tp_size: int) -> TokenLayout:
        """The layout under sequence parallelism: each shard cut into ``tp_size`` equal runs.

        Rows are in the order of a tp·cp group with tp fastest: row cp_rank · tp + tp_rank.
        """
        return replace(self, tokens=self.tokens.reshape(self.cp_size * tp_size, -1))

    def shard(self, tensor: Tensor, group_rank: int, dim: int = 0) -> Tensor:
        """Take ``group_rank``'s tokens: ``[..., total, ...]`` to ``[..., total/cp, ...]``.

        Embeddings, labels, loss mask and position ids all fit. The gradient of ``tensor`` is zero
        outside the rank's own tokens.

        Raises:
            ValueError: ``tensor`` does not hold the padded tokens along ``dim``.
        """
        if tensor.size(dim) != self.lengths.total:
            raise ValueError(
                f"the layout places {self.lengths.total} padded tokens, but dim {dim} of the "
                f"tensor has {tensor.size(dim)}; pad it with PaddedLengths.pad"
            )
        return tensor.index_select(dim, self.to(tensor.device).tokens[group_rank])


@lru_cache(maxsize=64)
def zigzag_layout(lengths: PaddedLengths, cp_size: int) -> TokenLayout:
    """Layout in which rank r holds half-chunks r and 2·cp-1-r of every sample.

    It balances causal attention. The local order is sample after sample, and in each the first
    half-chunk before the second.

    Raises:
        ValueError: a padded length does not divide by 2·cp_size.
    """
    padded = PaddedLengths(lengths.padded, lengths.padded)
    tokens = zigzag_owners(padded, cp_size).argsort(kind="stable").reshape(cp_size, -1)
    return TokenLayout(lengths, torch.from_numpy(tokens))


def zigzag_owners(lengths: PaddedLengths, cp_size: int) -> np.ndarray:
    """Rank that holds each real token of :func:`zigzag_layout`, int64 ``[sum(lengths.real)]``.

    Raises:
        ValueError: a padded length does not divide by 2·cp_size.
    """
    check_zigzag_lengths(lengths, cp_size)
    real, padded = (np.asarray(n, dtype=np.int64) for n in (lengths.real, lengths.padded))
    within, halves = np.arange(real.sum()) - np.repeat(real.cumsum() - real, real), 2 * cp_size
    half_chunk = within * halves // np.repeat(padded, real)
    return np.minimum(half_chunk, halves - 1 - half_chunk)


def check_zigzag_lengths(lengths: PaddedLengths, cp_size: int) -> None:
    """Refuse lengths that do not fit the zigzag layout on ``cp_size`` ranks.

    Raises:
        ValueError: a padded length does not divide by 2·cp_size.
    """
    if cp_size > 1 and any(padded % (2 * cp_size) for padded in lengths.padded):
        raise ValueError(
            f"zigzag over cp={cp_size} needs sample lengths that are multiples of {2 * cp_size}, "
            f"got {lengths.padded}; pad them with pad_lengths(lengths, {cp_size})"
        )


def contiguous_layout(lengths: PaddedLengths, cp_size: int) -> TokenLayout:
    """Layout for recurrences: rank r holds the r-th of cp equal runs of the whole token stream.

    ``cp_size`` divides the padded total.
    """
    tokens = torch.arange(lengths.total).view(cp_size, lengths.total // cp_size)
    return TokenLayout(lengths, tokens)
