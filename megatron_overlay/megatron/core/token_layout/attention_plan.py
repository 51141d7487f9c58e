# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of attention under context parallelism: which queries of a rank see which keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from megatron.core.token_layout.layouts import check_zigzag_lengths
from megatron.core.token_layout.padded_lengths import PaddedLengths


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Consecutive queries of one sample, which see the sample's first ``keys`` keys.

    ``bias`` aligns the last query with the last key, if a causal mask needs more than
    ``is_causal``. It is made here because a tensor subclass cannot be made in a dispatch mode.
    """

    queries: int
    keys: int
    bias: Tensor | None = None

    @classmethod
    def causal(cls, queries: int, keys: int) -> AttentionBlock:
        """A block with a causal mask that aligns the last query with the last key."""
        if queries == keys:
            return cls(queries, keys)
        from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler

        return cls(queries, keys, causal_lower_right(queries, keys))


@lru_cache(maxsize=64)
def attention_plan(
    lengths: PaddedLengths, cp_size: int, cp_rank: int, is_causal: bool
) -> tuple[tuple[AttentionBlock, ...], ...]:
    """Plan the part of ``cp_rank``, whose tokens are zigzag; made on the host once per batch.

    Args:
        is_causal: whether a query sees only the keys up to its own, instead of all of its sample.

    Returns:
        Blocks of each sample, in the rank's local order; none for an empty sample. Equal arguments
        return the same blocks.

    Raises:
        ValueError: the lengths do not fit the zigzag layout.
    """
    check_zigzag_lengths(lengths, cp_size)
    samples = []
    for real, padded in zip(lengths.real, lengths.padded, strict=True):
        if not padded:
            samples.append(())
        elif not is_causal:
            # A sample that is all padding attends to itself, to keep its values finite.
            samples.append((AttentionBlock(padded // cp_size, real or padded),))
        elif cp_size == 1:
            samples.append((AttentionBlock.causal(padded, padded),))
        else:
            half = padded // (2 * cp_size)
            ends = (cp_rank + 1, 2 * cp_size - cp_rank)
            samples.append(tuple(AttentionBlock.causal(half, end * half) for end in ends))
    return tuple(samples)
