# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Causal convolution with a halo on the ``causal_conv1d`` kernels, which take none when packed.

They go over all tokens as if nothing came before them, while the halo is on its way. The first
W - 1 outputs, which it changes, are then computed again from a window of 2 (W - 1) tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.context_parallel_layout import RecurrencePlan


def conv_without_halo(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx) -> Tensor:
    """``silu(conv(x))`` of ``x [B, S, D]``, with weight ``[D, W]``: a new tensor ``[B, S, D]``."""
    out = causal_conv1d_fwd_function(_channels(x), weight, bias, seq_idx, None, None, True)
    return out.transpose(1, 2)


def mend_head(
    out: Tensor, x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, plan: RecurrencePlan
) -> tuple[Tensor, Tensor]:
    """Compute the first W - 1 outputs again, in place, now that ``past [B, W - 1, D]`` is known.

    Returns:
        The tokens that they see, ``past`` first, for :func:`head_backward`; and these outputs. A
        shard of fewer tokens has as many.
    """
    reach = past.shape[1]
    window = torch.cat([past, x[:, :reach]], dim=1)
    head = conv_without_halo(window, weight, bias, plan.head_seq_idx(reach))[:, reach:]
    out[:, :reach] = head
    return window, head


class HeadGradients(NamedTuple):
    """What the first W - 1 outputs bring: gradients of the halo, these tokens, weight and bias."""

    past: Tensor
    tokens: Tensor
    weight: Tensor
    bias: Tensor | None

    def add_to(self, x_grad: Tensor, weight_grad: Tensor, bias_grad: Tensor | None) -> None:
        """Add, in place, to what the outputs after them bring."""
        x_grad[:, : self.tokens.shape[1]] += self.tokens
        weight_grad += self.weight
        if bias_grad is not None:
            bias_grad += self.bias


def head_backward(
    grad: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, plan: RecurrencePlan
) -> HeadGradients:
    """The adjoint of :func:`mend_head`; zeroes the first W - 1 tokens of ``grad [B, S, D]``."""
    reach = weight.shape[1] - 1
    head = grad[:, : window.shape[1] - reach]
    from_head = F.pad(head, (0, 0, reach, 0))
    head.zero_()
    found = torch.empty_like(window)
    seq_idx = plan.head_seq_idx(reach)
    of_parameters = conv_backward(from_head, window, weight, bias, seq_idx, found)
    return HeadGradients(found[:, :reach], found[:, reach:], *of_parameters)


def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx, x_grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The adjoint of :func:`conv_without_halo`: fills ``x_grad [B, S, D]``.

    Returns:
        Gradients of weight and bias.
    """
    # The kernels write into a view only if its rows are aligned as they want them.
    given = x_grad.transpose(1, 2) if _is_aligned(x_grad) else None
    found, weight_grad, bias_grad, _ = causal_conv1d_bwd_function(
        _channels(x), weight, bias, _channels(grad), seq_idx, None, None, given, False, True
    )
    if given is None:
        x_grad.copy_(found.transpose(1, 2))
    return weight_grad, bias_grad


def _is_aligned(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) % 8 == 0 and x.stride(0) % 8 == 0


def _channels(x: Tensor) -> Tensor:
    """``[B, S, D]`` to ``[B, D, S]`` with neighbouring channels, as the kernels want them."""
    return (x if _is_aligned(x) else x.contiguous()).transpose(1, 2)


class HaloConv(torch.autograd.Function):
    """``silu(conv(x))`` of ``x [B, S, D]`` whose first window reaches into ``past [B, W - 1, D]``.

    ``past`` is zero where nothing comes before; its gradient then has no meaning.
    """

    @staticmethod
    def forward(ctx, x, past, weight, bias, plan: RecurrencePlan):
        out, window = conv_without_halo(x, weight, bias, plan.seq_idx), None
        if plan.continues[plan.rank]:
            window, _ = mend_head(out, x, past, weight, bias, plan)
        ctx.save_for_backward(x, window, weight, bias)
        ctx.plan, ctx.past_shape = plan, past.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, window, weight, bias = ctx.saved_tensors
        x_grad, head = torch.empty_like(x), None
        if window is not None:
            grad = grad.clone()
            head = head_backward(grad, window, weight, bias, ctx.plan)
        parameters_grad = conv_backward(grad, x, weight, bias, ctx.plan.seq_idx, x_grad)
        if head is None:
            return x_grad, x.new_zeros(ctx.past_shape), *parameters_grad, None
        head.add_to(x_grad, *parameters_grad)
        return x_grad, head.past, *parameters_grad, None
