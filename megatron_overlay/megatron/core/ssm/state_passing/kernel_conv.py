# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Causal convolution over the links of a rank on the ``causal_conv1d`` kernels.

For packed samples, the kernels take no earlier tokens as initial states. So they first run over all
tokens as if nothing came before, while the halo is on its way. The first W - 1 outputs, which
depend on the halo, are then recomputed from a window of 2 (W - 1) tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.token_layout import Moving
from megatron.core.token_layout.recurrence_plan import RecurrencePlan


class HaloConv(torch.autograd.Function):
    """``silu(conv(x))`` of ``x [links, L, D]``, with weight ``[D, W]``; a collective."""

    @staticmethod
    def forward(ctx, x, weight, bias, plan: RecurrencePlan, group: dist.ProcessGroup):
        out, window, _ = conv_forward(x, weight, bias, plan, group)
        ctx.save_for_backward(x, window, weight, bias)
        ctx.plan, ctx.group = plan, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, window, weight, bias = ctx.saved_tensors
        # Others may hold this gradient: its changed part is restored, hidden from autograd.
        x_grad, grad = torch.empty_like(x), grad.contiguous().data
        head = grad[:, : weight.shape[1] - 1]
        kept = head.clone()
        of_parameters = conv_backward(grad, x, window, weight, bias, ctx.plan, ctx.group, x_grad)
        head.copy_(kept)
        return x_grad, *of_parameters, None, None


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: RecurrencePlan, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``silu(conv(x))`` of this rank's tokens ``[links, L, D]``; a collective.

    Returns:
        A new tensor ``[links, L, D]``; the window of inputs that each link's first W - 1 tokens
        see, for :func:`conv_backward`; and these output tokens. If they do not depend on earlier
        links, the last two are None. A link of fewer than W - 1 tokens counts as a whole.
    """
    halo = plan.halo(weight.shape[1] - 1)
    coming = Moving(plan.tokens_first(x[:, x.shape[1] - halo.kept :]), halo.route, group)
    out = conv_without_halo(x, weight, bias, plan.seq_idx)
    past = plan.links_first(coming.finish())
    if not any(plan.continues[link] for link in plan.own):
        return out, None, None
    reach = past.shape[1]
    window = torch.cat([past, x[:, :reach]], dim=1)
    head = conv_without_halo(window, weight, bias, plan.head_seq_idx(reach))[:, reach:]
    out[:, :reach] = head
    return out, window, head


def conv_backward(
    grad: Tensor,
    x: Tensor,
    window: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    plan: RecurrencePlan,
    group: dist.ProcessGroup,
    x_grad: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The adjoint of :func:`conv_forward`: fills ``x_grad [links, L, D]``; a collective.

    Args:
        grad: gradient of the outputs, ``[links, L, D]``; given a window, the first W - 1 tokens
            of each link are set to zero.

    Returns:
        Gradients of weight and bias.
    """
    reach = weight.shape[1] - 1
    halo, window_grad, of_head = plan.halo(reach), x[:, :0], None
    if window is not None:
        head = grad[:, : window.shape[1] - reach]
        padded, window_grad = F.pad(head, (0, 0, reach, 0)), torch.empty_like(window)
        head.zero_()
        seq_idx = plan.head_seq_idx(reach)
        of_head = _backward_without_halo(padded, window, weight, bias, seq_idx, window_grad)
    going = Moving(plan.tokens_first(window_grad[:, :reach]), halo.adjoint, group)
    of_parameters = _backward_without_halo(grad, x, weight, bias, plan.seq_idx, x_grad)
    if of_head is not None:
        x_grad[:, : head.shape[1]] += window_grad[:, reach:]
        for whole, part in zip(of_parameters, of_head, strict=True):
            if whole is not None:
                whole += part
    if not halo.adjoint.is_local:
        x_grad[:, x.shape[1] - halo.kept :] += plan.links_first(going.finish())
    return of_parameters


def conv_without_halo(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx) -> Tensor:
    """``silu(conv(x))`` with zeros before ``x [B, S, D]``: a new tensor ``[B, S, D]``."""
    out = causal_conv1d_fwd_function(_channels(x), weight, bias, seq_idx, None, None, True)
    return out.transpose(1, 2)


def _backward_without_halo(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx, x_grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    # The kernels write into a view only if its rows are aligned as they require.
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
    """View ``[B, S, D]`` as ``[B, D, S]`` with contiguous channels, as the kernels require."""
    return (x if _is_aligned(x) else x.contiguous()).transpose(1, 2)
