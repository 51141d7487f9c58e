# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Core attention for local specs: any context-parallel (CP) size, packed or not, no TE needed.

Keys and values, which grouped-query attention keeps small, are all-gathered along CP. Each rank
attends from its own two half-chunks of every sample to their causal prefixes; the zigzag layout
gives every rank the same work. The kernels are the fused ones of ``scaled_dot_product_attention``,
so a GPU stores no score matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.token_layout import (
    PaddedLengths,
    gather_tokens,
    lengths_of_batch,
    zigzag_layout,
)
from megatron.core.token_layout.attention_plan import AttentionBlock, attention_plan
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_FULL = (AttnMaskType.no_mask, AttnMaskType.padding)


class ContextParallelAttention(MegatronModule):
    """Drop-in core attention for Megatron's local ``SelfAttention`` specs.

    Tokens are in the zigzag layout of ``megatron.core.token_layout`` over
    ``pg_collection.cp``. With one CP rank there is no communication.

    Raises:
        ValueError: the config asks for dropout, a sliding window or a softmax variant; the layer is
            not self-attention; or the config's CP size differs from the group's.
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
        """Attend from this rank's queries to all tokens that they may see.

        Args:
            query: ``[S/cp, B, heads/tp, dim]``, or ``[T/cp, heads/tp, dim]`` when packed.
            key: as ``query``, with ``groups/tp`` heads.
            value: as ``key``.
            attention_mask: ignored when causal, as the mask type determines the mask; else None.
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
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        lengths = lengths_of_batch(
            packed_seq_params if packed else None, query.size(0) * self.cp_size
        )
        context = self._attend_to_samples(query, key, value, lengths, causal).flatten(2)
        return context.squeeze(1) if packed else context

    def _attend_to_samples(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: PaddedLengths, causal: bool
    ) -> Tensor:
        """Attend in all blocks of the plan, on ``[tokens, B, heads, dim]`` with sharded keys."""
        rank = self.cp_group.rank() if self.cp_size > 1 else 0
        samples = attention_plan(lengths, self.cp_size, rank, causal)
        sizes = [block.queries for sample in samples for block in sample]
        if not sizes:
            return query
        if self.cp_size > 1:
            layout = zigzag_layout(lengths, self.cp_size).to(key.device)
            both = gather_tokens(torch.stack((key, value), dim=1), layout, self.cp_group)
            key, value = both.unbind(1)
        # One split per tensor: its backward is one concatenation, however many samples there are.
        keys, values = key.split(lengths.padded), value.split(lengths.padded)
        queries = iter(query.split(sizes))
        contexts = [
            self._attend(next(queries), key[: block.keys], value[: block.keys], block, causal)
            for key, value, sample in zip(keys, values, samples, strict=True)
            for block in sample
        ]
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block: AttentionBlock,
        causal: bool,
    ) -> Tensor:
        """Attend in one block by SDPA, on ``[tokens, B, heads, dim]``."""
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
            attn_mask=block.bias,
            is_causal=causal and block.bias is None,
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
