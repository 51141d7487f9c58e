# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A hybrid stack whose tokens lie contiguously, but for its attention layers.

Recurrent layers want each rank's tokens contiguous, attention wants zigzag, and the layers in
between (MLP, experts) take either. Attention layers are few, so the stack converts its input once,
then around each of them, and its output at the end. Between pipeline stages tokens stay contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.state_passing.layer_tokens import LayerTokens
from megatron.core.ssm.state_passing.options import CONTIGUOUS

ATTENTION_SYMBOLS = ("*", "D")


class ContiguousTokens:
    """Converts for one stack; its attention layers convert for themselves from here on.

    Args:
        stack: HybridStack whose layers are built.
    """

    def __init__(self, stack: nn.Module) -> None:
        self._tokens = LayerTokens(stack.config, stack.pg_collection)
        self._is_first = stack.pre_process or stack.is_mtp_layer
        self._is_last = stack.post_process or stack.is_mtp_layer
        for symbol, layer in zip(stack.layer_type_list, stack.layers, strict=True):
            if symbol in ATTENTION_SYMBOLS:
                layer.register_forward_pre_hook(self._before_attention, with_kwargs=True)
                layer.register_forward_hook(self._after_attention, with_kwargs=True)

    def enter(
        self, hidden: Tensor, padding_mask: Tensor | None, packed: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the stack starts with; a collective.

        Args:
            hidden: ``[S/(cp·sp), B, H]``, zigzag on the first stage, then contiguous.
            padding_mask: bool ``[B, S/(cp·sp)]`` or None, zigzag on every stage.
        """
        if padding_mask is not None:
            # Some backends move no bool.
            rows = self._tokens.to_contiguous(padding_mask.t().to(torch.uint8), packed)
            padding_mask = rows.t().bool()
        if self._is_first:
            hidden = self._tokens.to_contiguous(hidden, packed)
        return hidden, padding_mask

    def leave(self, hidden: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """What the stack ends with: zigzag on the last stage; a collective there."""
        return self._tokens.to_zigzag(hidden, packed) if self._is_last else hidden

    def _before_attention(self, layer, args, kwargs):
        packed = kwargs.get("packed_seq_params")
        hidden = self._tokens.to_zigzag(kwargs["hidden_states"], packed)
        return args, kwargs | {"hidden_states": hidden}

    def _after_attention(self, layer, args, kwargs, output):
        hidden, *rest = output
        return self._tokens.to_contiguous(hidden, kwargs.get("packed_seq_params")), *rest


def contiguous_tokens(stack: nn.Module) -> ContiguousTokens | None:
    """For a stack that is to keep its tokens contiguous over several CP ranks; else None."""
    is_wanted = stack.config.hybrid_token_layout == CONTIGUOUS
    return ContiguousTokens(stack) if is_wanted and stack.pg_collection.cp.size() > 1 else None
