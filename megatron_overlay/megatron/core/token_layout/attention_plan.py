# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of attention under context parallelism: which queries of a rank see which keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout.device_copy import copied_to
from megatron.core.token_layout.layouts import TokenLayout, zigzag_layout
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


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Blocks of queries and keys in which one CP rank attends; made on the host once per batch.

    Attributes:
        layout: zigzag layout of the batch, on the device of the tensors.
        is_causal: whether a query sees only the keys up to its own, instead of all of its sample.
        samples: blocks of each sample, in the rank's local order; none for an empty sample.
    """

    layout: TokenLayout
    is_causal: bool
    samples: tuple[tuple[AttentionBlock, ...], ...]

    @classmethod
    def make(
        cls,
        lengths: PaddedLengths,
        cp_size: int,
        cp_rank: int,
        device: torch.device,
        is_causal: bool,
    ) -> AttentionPlan:
        """Plan for ``cp_rank`` of ``cp_size``; ValueError if the lengths do not fit zigzag."""
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
        return cls(zigzag_layout(lengths, cp_size).to(device), is_causal, tuple(samples))

    @property
    def blocks(self) -> list[AttentionBlock]:
        """Blocks of all samples, in the order of the local queries."""
        return [block for sample in self.samples for block in sample]

    @cached_property
    def cu_queries(self) -> Tensor:
        """Boundaries of the blocks' queries, int32 [blocks + 1]."""
        return self._boundaries([block.queries for block in self.blocks])

    @cached_property
    def cu_keys(self) -> Tensor:
        """Boundaries of the blocks' keys, laid end to end, int32 [blocks + 1]."""
        return self._boundaries([block.keys for block in self.blocks])

    @cached_property
    def key_tokens(self) -> Tensor:
        """Global tokens of the blocks' keys, laid end to end, int64 [cu_keys[-1]]."""
        starts = accumulate(self.layout.lengths.padded, initial=0)
        # The last element of starts is the end of the last sample.
        runs = [
            torch.arange(start, start + block.keys)
            for start, sample in zip(starts, self.samples, strict=False)
            for block in sample
        ]
        return copied_to(self.layout.tokens.device, torch.cat(runs))

    def _boundaries(self, counts: list[int]) -> Tensor:
        bounds = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        return copied_to(self.layout.tokens.device, bounds)


@lru_cache(maxsize=64)
def sequence_attention_plan(
    length: int, cp_size: int, cp_rank: int, device: torch.device, is_causal: bool
) -> AttentionPlan:
    """Plan of an ``[S, B]`` batch with S = ``length``, a multiple of 2·cp_size."""
    lengths = PaddedLengths((length,), (length,))
    return AttentionPlan.make(lengths, cp_size, cp_rank, device, is_causal)


def packed_attention_plan(
    packed_seq_params: PackedSeqParams,
    cp_group: dist.ProcessGroup | None,
    device: torch.device,
    is_causal: bool,
) -> AttentionPlan:
    """Plan of a packed batch, cached on ``packed_seq_params``.

    The first call reads ``cu_seqlens`` back to the host. If it comes before the layers run, no
    layer waits for the device.
    """
    size, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    plans = vars(packed_seq_params).setdefault("_attention_plans", {})
    key = (size, rank, device, is_causal)
    if key not in plans:
        lengths = PaddedLengths.of_packed(packed_seq_params)
        plans[key] = AttentionPlan.make(lengths, size, rank, device, is_causal)
    return plans[key]
