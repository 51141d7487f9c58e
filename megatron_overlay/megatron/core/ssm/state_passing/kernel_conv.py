# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Causal convolution with a halo on the ``causal_conv1d`` kernels, which take none when packed.

The kernels go over all tokens as if nothing came before them, while the halo is on its way. The
first W - 1 outputs, which it changes, are then computed again in plain PyTorch.
"""

from __future__ import annotations

import torch
from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.context_parallel_layout import RecurrencePlan
from megatron.core.ssm.ops.reference import causal_conv1d_fn


def conv_without_halo(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx) -> Tensor:
    """``silu(conv(x))`` of ``x [B, S, D]``, with weight ``[D, W]``: a new tensor ``[B, S, D]``."""
    out = causal_conv1d_fwd_function(_channels(x), weight, bias, seq_idx, None, None, True)
    return out.transpose(1, 2)


def mend_head(
    out: Tensor, x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, plan: RecurrencePlan
) -> None:
    """Compute the first W - 1 outputs again, in place, now that ``past [B, W - 1, D]`` is known."""
    head = _head(x[:, : past.shape[1]], past, weight, bias, plan.seq_idx)
    out[:, : past.shape[1]].copy_(head)


def head_backward(
    grad: Tensor, x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, plan: RecurrencePlan
) -> list[Tensor | None]:
    """The adjoint of :func:`mend_head`; zeroes the first W - 1 tokens of ``grad [B, S, D]``.

    Returns:
        fp32 gradients of the first tokens, of ``past``, of the weight and of the bias.
    """
    reach = past.shape[1]
    inputs = [x[:, :reach], past, weight, bias]
    leaves = [t if t is None else t.detach().float().requires_grad_() for t in inputs]
    with torch.enable_grad():
        head = _head(*leaves, plan.seq_idx)
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(head, wanted, grad[:, :reach].float()))
    grad[:, :reach].zero_()
    return [leaf if leaf is None else next(found) for leaf in leaves]


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


def _head(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, seq_idx) -> Tensor:
    out = causal_conv1d_fn(
        x.float().transpose(1, 2),
        weight.float(),
        None if bias is None else bias.float(),
        None if seq_idx is None else seq_idx[:, : x.shape[1]],
        initial_states=past.float().transpose(1, 2),
        activation="silu",
    )
    return out.transpose(1, 2)


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
        ctx.save_for_backward(x, past, weight, bias)
        ctx.plan = plan
        out = conv_without_halo(x, weight, bias, plan.seq_idx)
        if plan.continues[plan.rank]:
            mend_head(out, x, past, weight, bias, plan)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, past, weight, bias = ctx.saved_tensors
        plan, reach = ctx.plan, past.shape[1]
        x_grad, past_grad = torch.empty_like(x), torch.zeros_like(past)
        head = None
        if plan.continues[plan.rank]:
            grad = grad.clone()
            head = head_backward(grad, x, past, weight, bias, plan)
            past_grad = head[1].to(past.dtype)
        weight_grad, bias_grad = conv_backward(grad, x, weight, bias, plan.seq_idx, x_grad)
        if head is not None:
            x_grad[:, :reach] += head[0].to(x.dtype)
            weight_grad = weight_grad + head[2].to(weight.dtype)
            bias_grad = None if bias is None else bias_grad + head[3].to(bias.dtype)
        return x_grad, past_grad, weight_grad, bias_grad, None
