# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hybrid stack whose tokens lie contiguously except in attention layers.

Recurrent layers need each rank's tokens contiguous, attention needs zigzag, and other layers (MLP,
experts) take either. Attention layers are few, so the stack converts its input once, then before
and after each attention layer, and its output at the end. Between pipeline stages tokens stay
contiguous.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.state_passing.layer_tokens import LayerTokens, tokens_are_contiguous
from megatron.core.ssm.state_passing.options import CONTIGUOUS

RECURRENT = (Symbols.MAMBA, Symbols.GDN)
ANY_ORDER = (Symbols.MLP, Symbols.MOE)
"""Layers that take tokens in any order. Kinds in neither list get zigzag tokens."""


def keep_tokens_contiguous(stack: nn.Module) -> None:
    """Keep a HybridStack's tokens contiguous between its layers, by forward hooks.

    Does nothing unless the config has ``linear_cp_layout="contiguous"`` and there are several CP
    ranks.

    Raises:
        ValueError: the config captures single layers as CUDA graphs, which would lack the hooks.
    """
    config = stack.config
    if config.linear_cp_layout != CONTIGUOUS or stack.pg_collection.cp.size() == 1:
        return
    if config.cuda_graph_impl in ("local", "transformer_engine"):
        raise ValueError(
            f"linear_cp_layout={CONTIGUOUS!r} takes no CUDA graphs of single layers "
            f"(cuda_graph_impl={config.cuda_graph_impl!r}); 'full_iteration' and 'none' fit"
        )
    around = _Conversions(LayerTokens(config, stack.pg_collection))
    stack.register_forward_pre_hook(around.enter, with_kwargs=True)
    if stack.post_process:
        stack.register_forward_hook(around.leave, with_kwargs=True)
    for symbol, layer in zip(stack.layer_type_list, stack.layers, strict=True):
        if symbol in RECURRENT:
            tokens_are_contiguous(layer)
        elif symbol not in ANY_ORDER:
            layer.register_forward_pre_hook(around.before_attention, with_kwargs=True)
            layer.register_forward_hook(around.after_attention, with_kwargs=True)


class _Conversions:
    """Forward hooks that convert between token layouts; collective if they move tokens."""

    def __init__(self, tokens: LayerTokens) -> None:
        self._tokens = tokens

    def enter(self, stack, args, kwargs):
        """Make the padding mask contiguous on every stage, and hidden states on the first."""
        mask = kwargs.get("padding_mask")
        if mask is not None:
            # Some backends cannot send bool.
            mask = mask.t().to(torch.uint8)
            rows = self._tokens.to_contiguous(mask, kwargs.get("packed_seq_params"))
            kwargs = kwargs | {"padding_mask": rows.t().bool()}
        if stack.pre_process:
            return _with_hidden(self._tokens.to_contiguous, args, kwargs)
        return args, kwargs

    def leave(self, stack, args, kwargs, hidden):
        """Convert the last stage's output to zigzag; its final norm takes tokens in any order."""
        return self._tokens.to_zigzag(hidden, kwargs.get("packed_seq_params"))

    def before_attention(self, layer, args, kwargs):
        """Convert the hidden states that an attention layer takes to zigzag."""
        return _with_hidden(self._tokens.to_zigzag, args, kwargs)

    def after_attention(self, layer, args, kwargs, output):
        """Convert the hidden states that it returns to contiguous; keep its other outputs."""
        hidden, *rest = output
        return self._tokens.to_contiguous(hidden, kwargs.get("packed_seq_params")), *rest


def _with_hidden(move, args, kwargs):
    """Arguments of a forward after ``move`` of the hidden states, the first one or a keyword."""
    packed = kwargs.get("packed_seq_params")
    if args:
        return (move(args[0], packed), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": move(kwargs["hidden_states"], packed)}
