# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over contiguous shards on the kernels of ``fla`` 0.4.

The kernels of the rule's steps (arXiv 2412.06464, section 3.3) are called one by one. A rank's
state and transition are computed from its chunks' solved systems by ``states``, and
gathered before states pass from chunk to chunk. In the backward, gradients are gathered likewise,
and combined with the transitions of the forward.

The forward saves what fla's own function saves, the state that enters, and the transitions of the
ranks that the leaving state reaches.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from fla.ops.common.chunk_delta_h import (
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
)
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum, solve_tril
from fla.ops.utils.index import prepare_chunk_indices
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ssm.state_passing.gated_delta import states as gated_delta_states
from megatron.core.ssm.state_passing.scan_over_ranks import (
    StateGather,
    entering_state,
    leaving_gradient,
)
from megatron.core.token_layout.recurrence_plan import RecurrencePlan

CHUNK = gated_delta_states.CHUNK


def kernel_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: RecurrencePlan,
    group: dist.ProcessGroup,
) -> Tensor:
    """``gated_delta_net.reference_rule`` by GPU kernels, for keys that :func:`takes` accepts."""
    tensors = (t.contiguous() for t in (query, key, value, g, beta))
    return _Rule.apply(*tensors, plan, group)


def takes(key: Tensor) -> bool:
    """Whether there are kernels for the key's dtype and K: up to 256 in 16 bits, 128 in 32."""
    return key.element_size() <= 4 and key.shape[-1] * key.element_size() <= 512


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, g, beta, plan, group):
        scale, packed = key.shape[-1] ** -0.5, _packed(plan)
        decay = chunk_local_cumsum(g, chunk_size=CHUNK, **packed)
        system = chunk_scaled_dot_kkt_fwd(
            k=key, g=decay, beta=beta, output_dtype=torch.float32, **packed
        )
        system = solve_tril(A=system, output_dtype=key.dtype, **packed)
        w, u = recompute_w_u_fwd(k=key, v=value, beta=beta, A=system, g=decay, **packed)
        entering = after = None
        if not plan.is_local:
            both, *own = gated_delta_states.leaving_state(key, w, u, decay, plan.bounds[-2])
            states, transitions = StateGather(both, [t.shape for t in own], group).wait()
            entering, after = entering_state(states, transitions, plan)
        states, written, _ = chunk_gated_delta_rule_fwd_h(
            k=key, w=w, u=u, g=decay, initial_state=_of_samples(entering, plan, 0), **packed
        )
        out = chunk_fwd_o(q=query, k=key, v=written, h=states, g=decay, scale=scale, **packed)
        ctx.save_for_backward(query, key, value, decay, beta, system, entering, after)
        ctx.plan, ctx.group, ctx.g_dtype = plan, group, g.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, decay, beta, system, entering, after = ctx.saved_tensors
        plan, grad, scale = ctx.plan, grad.contiguous(), key.shape[-1] ** -0.5
        packed = _packed(plan)
        w, u = recompute_w_u_fwd(k=key, v=value, beta=beta, A=system, g=decay, **packed)
        written_grad = chunk_bwd_dv_local(q=query, k=key, g=decay, do=grad, scale=scale, **packed)
        coming = leaving = None
        if not plan.is_local:
            own = gated_delta_states.entering_gradient(
                query, key, w, decay, grad, written_grad, scale, plan.bounds[1]
            )
            coming = StateGather(own.flatten(), [own.shape], ctx.group)
        states, written, _ = chunk_gated_delta_rule_fwd_h(
            k=key, w=w, u=u, g=decay, initial_state=_of_samples(entering, plan, 0), **packed
        )
        if coming is not None:
            leaving = leaving_gradient(*coming.wait(), after, plan)
        states_grad, _, written_grad = chunk_gated_delta_rule_bwd_dhu(
            q=query, k=key, w=w, g=decay, dht=_of_samples(leaving, plan, -1), do=grad,
            dv=written_grad, scale=scale, **packed,
        )  # fmt: skip
        query_grad, key_grad, w_grad, decay_grad = chunk_bwd_dqkwg(
            q=query, k=key, v=written, w=w, g=decay, h=states, dv=written_grad, do=grad,
            dh=states_grad, scale=scale, **packed,
        )  # fmt: skip
        key_grad_more, value_grad, beta_grad, decay_grad_more = prepare_wy_repr_bwd(
            k=key, v=value, beta=beta, g=decay, A=system, dw=w_grad, du=written_grad, **packed
        )
        g_grad = chunk_local_cumsum(
            decay_grad.add_(decay_grad_more), chunk_size=CHUNK, reverse=True, **packed
        )
        return (
            query_grad.to(query.dtype),
            key_grad.add_(key_grad_more).to(key.dtype),
            value_grad.to(value.dtype),
            g_grad.to(ctx.g_dtype),
            beta_grad.to(beta.dtype),
            None,
            None,
        )


def _packed(plan: RecurrencePlan) -> dict[str, Tensor]:
    """Kernel arguments for the samples of this rank's tokens; empty for one sample."""
    if plan.seq_idx is None:
        return {}
    bounds = plan.cu_seqlens
    indices = prepare_chunk_indices(bounds, CHUNK, cu_seqlens_cpu=plan.cu_seqlens_host)
    return {"cu_seqlens": bounds, "chunk_indices": indices}


def _of_samples(state: Tensor | None, plan: RecurrencePlan, sample: int) -> Tensor | None:
    """States of this rank's N samples, ``[N, H, K, V]``: ``state`` for ``sample``, else zero.

    Args:
        state: ``[B, H, K, V]``, returned unchanged for one sample; with several samples B is 1.
    """
    if state is None or plan.seq_idx is None:
        return state
    found = state.new_zeros(len(plan.bounds) - 1, *state.shape[1:])
    found[sample] = state[0]
    return found
