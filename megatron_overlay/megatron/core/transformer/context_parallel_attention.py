# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Core attention for local specs: any context-parallel (CP) size, packed or not, no TE needed.

Keys and values are all-gathered along CP, which grouped-query attention keeps small, and each rank
attends from its own two half-chunks of every sample to their causal prefixes. The zigzag layout
gives every rank the same work. Kernels are ``scaled_dot_product_attention``'s fused ones: on a GPU
no score matrix is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from megatron.core.context_parallel_layout import (
    PaddedLengths,
    TokenLayout,
    gather_tokens,
    zigzag_layout,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_FULL = (AttnMaskType.no_mask, AttnMaskType.padding)


@dataclass(frozen=True, eq=False)
class CausalBlock:
    """A half-chunk of one sample: its queries, the last of which sees ``keys`` keys from the first.

    ``bias`` aligns the last query with the last key; None where the block is square.
    """

    queries: int
    keys: int
    bias: CausalBias | None

    @classmethod
    def make(cls, queries: int, keys: int) -> CausalBlock:
        """Align ``queries`` to the end of ``keys``."""
        return cls(queries, keys, None if queries == keys else causal_lower_right(queries, keys))


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one CP rank attends to, per sample; made on the host once per batch.

    Attributes:
        layout: zigzag layout of the batch, on the device of the tensors.
        query_splits: tokens of each sample on this rank.
        blocks: for each sample, its half-chunks on this rank (the whole sample with one rank).
    """

    layout: TokenLayout
    query_splits: tuple[int, ...]
    blocks: tuple[tuple[CausalBlock, ...], ...]

    @classmethod
    def make(
        cls, lengths: PaddedLengths, cp_size: int, cp_rank: int, device: torch.device
    ) -> AttentionPlan:
        """Plan for ``cp_rank`` of ``cp_size``; ValueError if the lengths do not fit zigzag."""
        layout = zigzag_layout(lengths, cp_size).to(device)
        if cp_size == 1:
            blocks = tuple((CausalBlock.make(length, length),) for length in lengths.padded)
        else:
            ends = (cp_rank + 1, 2 * cp_size - cp_rank)
            halves = [length // (2 * cp_size) for length in lengths.padded]
            blocks = tuple(
                tuple(CausalBlock.make(half, end * half) for end in ends) for half in halves
            )
        return cls(layout, tuple(length // cp_size for length in lengths.padded), blocks)


class ContextParallelAttention(MegatronModule):
    """Drop-in core attention for Megatron's local ``SelfAttention`` specs.

    The tokens of a rank follow the zigzag layout of ``megatron.core.context_parallel_layout``,
    over ``pg_collection.cp``. With one CP rank there is no communication.

    Raises:
        ValueError: dropout, a sliding window or a softmax variant is asked for, or the CP size of
            the config is not that of the group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        unsupported = {
            "attention_dropout": (dropout, 0),
            "window_size": (config.window_size, None),
            "softmax_type": (config.softmax_type, "vanilla"),
            "attention_type": (attention_type, "self"),
        }
        for name, (found, wanted) in unsupported.items():
            if found != wanted:
                raise ValueError(
                    f"ContextParallelAttention needs {name}={wanted!r}, found {found!r}"
                )
        if pg_collection is None:
            raise ValueError("ContextParallelAttention needs a pg_collection with tp and cp")
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        # Read by MegatronModule.sharded_state_dict.
        self.tp_group = pg_collection.tp
        self.cp_group = getattr(pg_collection, "cp", None)
        self.cp_size = 1 if self.cp_group is None else self.cp_group.size()
        if self.cp_size != config.context_parallel_size:
            raise ValueError(
                f"config.context_parallel_size is {config.context_parallel_size}, but "
                f"pg_collection.cp has {self.cp_size} ranks"
            )
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend from this rank's queries to every token they may see.

        Args:
            query: ``[S/cp, B, heads/tp, dim]``, or ``[T/cp, heads/tp, dim]`` when packed.
            key: as ``query``, with ``groups/tp`` heads.
            value: as ``key``.
            attention_mask: ignored when causal, as the mask type says it all; else None.
            attn_mask_type: overrides the layer's.
            attention_bias: not supported.
            packed_seq_params: global ``cu_seqlens`` of a packed (``thd``) batch.

        Returns:
            ``[S/cp, B, heads/tp * dim]``, or ``[T/cp, heads/tp * dim]`` when packed. Values at
            padding tokens are finite and mean nothing.
        """
        causal = self._is_causal(attn_mask_type or self.attn_mask_type, attention_mask)
        if attention_bias is not None:
            raise ValueError("ContextParallelAttention takes no attention_bias")
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            plan = packed_attention_plan(packed_seq_params, self.cp_group, query.device)
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        elif self.cp_size > 1:
            plan = _sequence_plan(
                query.size(0) * self.cp_size, self.cp_size, self.cp_group.rank(), query.device
            )
        else:
            block = CausalBlock.make(query.size(0), key.size(0)) if causal else None
            return _merge_heads(self._attend(query, key, value, block))
        context = self._attend_planned(query, key, value, causal, plan)
        return context.squeeze(1) if packed else context

    def _attend_planned(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, plan: AttentionPlan
    ) -> Tensor:
        lengths = plan.layout.lengths
        if query.size(0) != plan.layout.shard_size:
            raise ValueError(
                f"cu_seqlens place {plan.layout.shard_size} tokens on each of {self.cp_size} CP "
                f"ranks, but this one has {query.size(0)}"
            )
        if self.cp_size > 1:
            both = gather_tokens(torch.stack((key, value), dim=1), plan.layout, self.cp_group)
            key, value = both.unbind(1)
        # One split per tensor: its backward is one concatenation, however many samples there are.
        samples = zip(
            query.split(plan.query_splits),
            key.split(lengths.padded),
            value.split(lengths.padded),
            plan.blocks,
            lengths.real,
            strict=True,
        )
        context = [query.new_zeros((0, *query.shape[1:]))]
        for sample_query, sample_key, sample_value, blocks, real in samples:
            if not len(sample_query):
                continue
            if causal:
                halves = sample_query.split([block.queries for block in blocks])
                for half, block in zip(halves, blocks, strict=True):
                    seen = slice(block.keys)
                    context.append(self._attend(half, sample_key[seen], sample_value[seen], block))
            else:
                # A sample of padding only attends to itself, for the sake of finite values.
                seen = slice(real or None)
                context.append(
                    self._attend(sample_query, sample_key[seen], sample_value[seen], None)
                )
        return _merge_heads(torch.cat(context))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, block: CausalBlock | None
    ) -> Tensor:
        """SDPA on ``[tokens, B, heads, dim]``, causal if a block is given."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = query.size(1) != key.size(1)
        if grouped and query.is_cuda and query.dtype not in (torch.bfloat16, torch.float16):
            # Only flash attention, which is 16-bit, fuses grouped heads.
            repeats = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            grouped = False
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=block.bias if block else None,
            is_causal=block is not None and block.bias is None,
            scale=self.softmax_scale,
            enable_gqa=grouped,
        )
        return context.permute(2, 0, 1, 3)

    @staticmethod
    def _is_causal(mask_type: AttnMaskType, attention_mask: Tensor | None) -> bool:
        if mask_type in _CAUSAL:
            return True
        if mask_type in _FULL and attention_mask is None:
            return False
        raise ValueError(
            "ContextParallelAttention is causal, or full without an attention_mask; got "
            f"{mask_type} with attention_mask {'None' if attention_mask is None else 'given'}"
        )


def packed_attention_plan(
    packed_seq_params: PackedSeqParams,
    cp_group: torch.distributed.ProcessGroup | None,
    device: torch.device,
) -> AttentionPlan:
    """The plan of a packed batch, kept on ``packed_seq_params`` once made.

    The first call reads ``cu_seqlens`` back to the host. Make it before the layers run, and none
    of them waits for the device.
    """
    size, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    plans = vars(packed_seq_params).setdefault("_attention_plans", {})
    if (size, rank, device) not in plans:
        real = packed_seq_params.cu_seqlens_q
        padded = packed_seq_params.cu_seqlens_q_padded
        padded = real if padded is None else padded
        lengths = PaddedLengths(tuple(real.diff().tolist()), tuple(padded.diff().tolist()))
        plans[size, rank, device] = AttentionPlan.make(lengths, size, rank, device)
    return plans[size, rank, device]


@lru_cache(maxsize=64)
def _sequence_plan(length: int, cp_size: int, cp_rank: int, device: torch.device) -> AttentionPlan:
    return AttentionPlan.make(PaddedLengths((length,), (length,)), cp_size, cp_rank, device)


def _merge_heads(context: Tensor) -> Tensor:
    """``[tokens, B, heads, dim]`` to ``[tokens, B, heads * dim]``."""
    return context.flatten(2)
