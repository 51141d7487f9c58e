# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Causal convolution with a halo on the ``causal_conv1d`` kernels, which take none when packed.

The kernels go over all tokens as if nothing came before them, while the halo is on its way. The
first W - 1 outputs, which it changes, are then computed again in plain PyTorch.
"""

from __future__ import annotations

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
) -> Tensor:
    """Compute the first W - 1 outputs again, in place, now that ``past [B, W - 1, D]`` is known.

    Returns:
        Them before the activation, ``[B, W - 1, D]`` of fp32: for :func:`restore_head` and
        :func:`head_backward`. A shard of fewer tokens has as many.
    """
    before = (_taps(x, past, plan) * weight.float()).sum(-1)
    if bias is not None:
        before = before + bias
    restore_head(out, before)
    return before


def restore_head(out: Tensor, before: Tensor) -> None:
    """Put in place what :func:`mend_head` computed."""
    out[:, : before.shape[1]] = F.silu(before)


def head_backward(
    grad: Tensor, x: Tensor, past: Tensor, weight: Tensor, before: Tensor, plan: RecurrencePlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The adjoint of :func:`mend_head`; zeroes the first W - 1 tokens of ``grad [B, S, D]``.

    Returns:
        fp32 gradients of the first tokens, of ``past``, of the weight and of the bias.
    """
    reach = past.shape[1]
    head = grad[:, : before.shape[1]]
    before_grad = torch.ops.aten.silu_backward(head.float(), before)
    head.zero_()
    spread = before_grad.unsqueeze(-1)
    weight_grad = (spread * _taps(x, past, plan)).sum((0, 1))
    taps_grad = spread * weight
    own = plan.head_taps(weight.shape[1])
    if own is not None:
        taps_grad = taps_grad * own
    tokens = [x.shape[0], reach + before.shape[1], x.shape[2]]
    tokens_grad = torch.ops.aten.unfold_backward(taps_grad, tokens, 1, weight.shape[1], 1)
    return tokens_grad[:, reach:], tokens_grad[:, :reach], weight_grad, before_grad.sum((0, 1))


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


def add_head(
    head: tuple[Tensor, ...] | None, x_grad: Tensor, weight_grad: Tensor, bias_grad: Tensor | None
) -> None:
    """Add, in place, what :func:`head_backward` found to gradients of the rest."""
    if head is None:
        return
    x_grad[:, : head[0].shape[1]] += head[0]
    weight_grad += head[2]
    if bias_grad is not None:
        bias_grad += head[3]


def _taps(x: Tensor, past: Tensor, plan: RecurrencePlan) -> Tensor:
    """What each of the first W - 1 outputs sees, ``[B, W - 1, D, W]``."""
    reach = past.shape[1]
    taps = torch.cat([past, x[:, :reach]], dim=1).unfold(1, reach + 1, 1)
    own = plan.head_taps(reach + 1)
    return taps if own is None else taps * own


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
        out, before = conv_without_halo(x, weight, bias, plan.seq_idx), None
        if plan.continues[plan.rank]:
            before = mend_head(out, x, past, weight, bias, plan)
        ctx.save_for_backward(x, past, weight, bias, before)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, past, weight, bias, before = ctx.saved_tensors
        plan, head = ctx.plan, None
        x_grad, past_grad = torch.empty_like(x), torch.zeros_like(past)
        if before is not None:
            grad = grad.clone()
            head = head_backward(grad, x, past, weight, before, plan)
            past_grad = head[1].to(past.dtype)
        weight_grad, bias_grad = conv_backward(grad, x, weight, bias, plan.seq_idx, x_grad)
        add_head(head, x_grad, weight_grad, bias_grad)
        return x_grad, past_grad, weight_grad, bias_grad, None
