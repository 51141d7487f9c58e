# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 scan over the links of a rank on the kernels of ``mamba_ssm`` 2.3.

The kernels of the scan's steps (arXiv 2405.21060, section 6) are called one by one. The state from
earlier ranks enters between two of them, chunk states and state passing, and its gradient enters
between the same two in the backward, so a rank goes through its tokens as often as without context
parallelism. The collectives overlap kernels that do not need their result.

The forward saves what upstream's fused path saves: the projection and the output before the gate
(and the decays, 2 % of these). The convolution and the states are recomputed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_bwd, _bmm_chunk_fwd
from mamba_ssm.ops.triton.ssd_chunk_scan import (
    _chunk_scan_bwd_dC,
    _chunk_scan_bwd_dcb,
    _chunk_scan_bwd_ddAcs_stable,
    _chunk_scan_bwd_dstates,
    _chunk_scan_bwd_dz,
    _chunk_scan_fwd,
)
from mamba_ssm.ops.triton.ssd_chunk_state import (
    _chunk_cumsum_bwd,
    _chunk_cumsum_fwd,
    _chunk_state_bwd_db,
    _chunk_state_fwd,
)
from mamba_ssm.ops.triton.ssd_combined import _chunk_scan_chunk_state_bwd_dx
from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_bwd, _state_passing_fwd
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ssm.state_passing import kernel_conv
from megatron.core.ssm.state_passing.mamba import states as mamba_states
from megatron.core.ssm.state_passing.mamba.layer import Sizes, Weights
from megatron.core.ssm.state_passing.scan_over_ranks import (
    StateGather,
    entering_state,
    leaving_gradient,
)
from megatron.core.token_layout.recurrence_plan import RecurrencePlan


def kernel_scan(
    projected: Tensor,
    weights: Weights,
    sizes: Sizes,
    plan: RecurrencePlan,
    group: dist.ProcessGroup,
) -> Tensor:
    """``mamba.reference_scan`` by GPU kernels; D is in fp32 or in the dtype of ``projected``."""
    return _Scan.apply(projected, *weights, sizes, plan, group)


class _Tokens(NamedTuple):
    """Views of the convolution's output, or of its gradient, by head (x) or group (B, C)."""

    x: Tensor
    B: Tensor
    C: Tensor

    @classmethod
    def of(cls, convolved: Tensor, heads: int, sizes: Sizes) -> _Tokens:
        inner = heads * sizes.headdim
        states = (convolved.shape[-1] - inner) // 2
        x, B, C = convolved.split([inner, states, states], dim=-1)
        groups = (sizes.ngroups, -1)
        return cls(x.unflatten(-1, (heads, -1)), B.unflatten(-1, groups), C.unflatten(-1, groups))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, projected, conv_weight, conv_bias, dt_bias, A, D, sizes, plan, group):
        seq_idx, heads = plan.seq_idx, A.shape[0]
        widths = [heads * sizes.headdim, conv_weight.shape[0], heads]
        z, xBC, dt = projected.split(widths, dim=-1)
        convolved, window, head = kernel_conv.conv_forward(xBC, conv_weight, conv_bias, plan, group)
        x, B, C = _Tokens.of(convolved, heads, sizes)

        decay, steps = _chunk_cumsum_fwd(dt, A, sizes.chunk, dt_bias=dt_bias, dt_softplus=True)
        states = _chunk_state_fwd(B, x, steps, decay, seq_idx=seq_idx, states_in_fp32=True)
        coming = None
        if not plan.is_local:
            both, *own = mamba_states.leaving_state(states, decay, seq_idx)
            coming = StateGather(both, [t.shape for t in own], group)
        scores = _bmm_chunk_fwd(C, B, sizes.chunk, seq_idx=seq_idx, output_dtype=torch.float32)
        entering = after = None
        if coming is not None:
            entering, after = entering_state(*coming.wait(), plan)
        states = _pass_states(states, decay, entering, seq_idx, sizes.chunk, C.dtype)
        z = z.unflatten(-1, (heads, -1))
        out, ungated = _chunk_scan_fwd(
            scores, x, steps, decay, C, states, D=D, z=z, seq_idx=seq_idx
        )
        ctx.save_for_backward(
            projected, conv_weight, conv_bias, dt_bias, A, D, decay, steps, ungated, window, head,
            entering, after,
        )  # fmt: skip
        ctx.sizes, ctx.plan, ctx.group = sizes, plan, group
        return out.flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (
            projected, conv_weight, conv_bias, dt_bias, A, D, decay, steps, ungated, window, head,
            entering, after,
        ) = ctx.saved_tensors  # fmt: skip
        sizes, plan, group, heads = ctx.sizes, ctx.plan, ctx.group, A.shape[0]
        seq_idx = plan.seq_idx
        widths = [heads * sizes.headdim, conv_weight.shape[0], heads]
        z, xBC, dt = projected.split(widths, dim=-1)
        projected_grad = torch.empty_like(projected)
        z_grad, xBC_grad, dt_grad = projected_grad.split(widths, dim=-1)

        convolved = kernel_conv.conv_without_halo(xBC, conv_weight, conv_bias, seq_idx)
        if head is not None:
            convolved[:, : head.shape[1]] = head
        x, B, C = _Tokens.of(convolved, heads, sizes)
        convolved_grad = torch.empty_like(convolved)
        dx, dB, dC = _Tokens.of(convolved_grad, heads, sizes)

        scores = _bmm_chunk_fwd(C, B, sizes.chunk, seq_idx=seq_idx, output_dtype=torch.float32)
        states = _chunk_state_fwd(B, x, steps, decay, seq_idx=seq_idx, states_in_fp32=True)
        states = _pass_states(states, decay, entering, seq_idx, sizes.chunk, states.dtype)
        # The gate comes first, as the rest needs the gradient of the output before the gate.
        grad = grad.contiguous().unflatten(-1, (heads, -1))
        by_head = (heads, -1)
        _, grad, D_grad = _chunk_scan_bwd_dz(
            x, z.unflatten(-1, by_head), ungated, grad, sizes.chunk, has_ddAcs=False, D=D,
            dz=z_grad.unflatten(-1, by_head),
        )  # fmt: skip

        entered_grad = _chunk_scan_bwd_dstates(C, decay, grad, seq_idx=seq_idx, dtype=states.dtype)
        coming = None
        if not plan.is_local:
            own = mamba_states.entering_gradient(entered_grad, decay, seq_idx)
            coming = StateGather(own.flatten(), [own.shape], group)
        scores_grad = _chunk_scan_bwd_dcb(
            x, steps, decay, grad, seq_idx=seq_idx, ngroups=sizes.ngroups
        )
        decay_grad = _chunk_scan_bwd_ddAcs_stable(x, steps, decay, grad, scores)
        leaving = None
        if coming is not None:
            leaving = leaving_gradient(*coming.wait(), after, plan)
        states_grad, chunk_decay_grad, _, states = _state_passing_bwd(
            states.flatten(-2),
            decay[..., -1],
            entered_grad.flatten(-2),
            dfinal_states=None if leaving is None else leaving.flatten(-2),
            seq_idx=seq_idx,
            has_initial_states=entering is not None,
            dstates_dtype=x.dtype,
            states_dtype=x.dtype,
            chunk_size=sizes.chunk,
        )
        del entered_grad  # as large as the states
        states_grad, states = (t.unflatten(-1, (sizes.headdim, -1)) for t in (states_grad, states))

        _, steps_grad, _ = _chunk_scan_chunk_state_bwd_dx(
            x, steps, decay, B, scores, grad, states_grad, D=D, seq_idx=seq_idx, dx=dx
        )
        from_states, decay_grad_after = _chunk_state_bwd_db(
            x, steps, decay, states_grad, seq_idx=seq_idx, B=B, ngroups=sizes.ngroups
        )
        to_states, decay_grad_before = _chunk_scan_bwd_dC(
            states, decay, grad, seq_idx=seq_idx, C=C, ngroups=sizes.ngroups
        )
        _bmm_chunk_bwd(C, scores_grad, residual=from_states, out=dB)
        _bmm_chunk_bwd(B, scores_grad.transpose(-1, -2), residual=to_states, out=dC)
        mamba_states.add_decay_gradients(
            decay_grad, decay_grad_after, decay_grad_before, chunk_decay_grad
        )
        _, A_grad, dt_bias_grad = _chunk_cumsum_bwd(
            decay_grad, steps_grad, dt, A, dt_bias=dt_bias, dt_softplus=True, ddt=dt_grad
        )

        weight_grad, bias_grad = kernel_conv.conv_backward(
            convolved_grad, xBC, window, conv_weight, conv_bias, plan, group, xBC_grad
        )
        return (
            projected_grad, weight_grad, bias_grad, dt_bias_grad, A_grad, D_grad, None, None, None
        )  # fmt: skip


def _pass_states(states, decay, entering, seq_idx, chunk_size: int, dtype) -> Tensor:
    """The state that enters each chunk, ``[B, c, H, P, N]``."""
    passed, _ = _state_passing_fwd(
        states.flatten(-2),
        decay[..., -1],
        initial_states=None if entering is None else entering.flatten(-2),
        seq_idx=seq_idx,
        chunk_size=chunk_size,
        out_dtype=dtype,
    )
    return passed.unflatten(-1, states.shape[-2:])
