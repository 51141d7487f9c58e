# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The scan over ranks of a linear recurrence whose tokens lie contiguously on them.

What rank r does to a state is affine, ``leaving_r = T_r entering_r + S_r``: S_r is what its tokens
leave when nothing enters, T_r the transition of all of them. One all-gather of (S, T), whose size
does not depend on the sequence length, lets every rank work out the state that enters it. The
adjoint is the same scan the other way: with g_r the gradient of ``entering_r`` by the rank's own
outputs alone, that of ``leaving_r`` is ``g_{r+1} + T_{r+1}^T (that of leaving_{r+1})``.

States are ``[B, H, K, V]``. A transition is a matrix ``[B, H, K, K]`` that acts from the left, or
one decay a head, ``[B, H, 1, 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.context_parallel_layout import RecurrencePlan


class StateGather:
    """An all-gather of states, and of transitions where given, under way over the CP ranks.

    Start it, launch whatever does not need the result, then ``wait``.

    Args:
        own: this rank's state, and its transition where there is one, one after the other, flat.
        shapes: of the state, ``[B, H, K, V]``, and the transition, ``[B, H, K, K | 1]``.
    """

    def __init__(self, own: Tensor, shapes: Sequence[torch.Size], group: dist.ProcessGroup) -> None:
        self._shapes, self._size = shapes, group.size()
        self._gathered = own.new_empty(self._size * own.numel())
        self._work = dist.all_gather_into_tensor(self._gathered, own, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """The same of all ranks, ``[cp, B, H, …]`` each. Blocks the stream, not the host."""
        self._work.wait()
        parts = self._gathered.view(self._size, -1).split(
            [shape.numel() for shape in self._shapes], dim=1
        )
        pairs = zip(parts, self._shapes, strict=True)
        return [part.unflatten(1, shape) for part, shape in pairs]


def entering_state(states: Tensor, transitions: Tensor, plan: RecurrencePlan) -> Tensor | None:
    """The state that enters this rank, ``[B, H, K, V]``; None where its first sample begins here.

    Args:
        states: S of all ranks, ``[cp, B, H, K, V]``.
        transitions: T of all ranks, ``[cp, B, H, K, K]`` or ``[cp, B, H, 1, 1]``.
    """
    entering = None
    for rank in plan.ranks_before():
        entering = _leaving(states[rank], transitions[rank], entering)
    return entering


def transitions_after(transitions: Tensor, plan: RecurrencePlan) -> Tensor:
    """A copy of those of ``transitions [cp, B, H, …]`` that :func:`leaving_gradient` needs.

    The tensor that they were gathered in, cp times a state, need not outlive the forward.
    """
    after = plan.ranks_after()
    return transitions[after.start : after.stop].clone()


def leaving_gradient(grads: Tensor, after: Tensor, plan: RecurrencePlan) -> Tensor | None:
    """Gradient of the state that leaves this rank; None where it enters no other.

    Args:
        grads: g of all ranks, ``[cp, B, H, K, V]``: of the entering state, by own outputs alone.
        after: by :func:`transitions_after`.
    """
    leaving = None
    for rank, transition in reversed([*zip(plan.ranks_after(), after, strict=True)]):
        leaving = _leaving(grads[rank], transition.mT, leaving)
    return leaving


def carry_state(
    state: Tensor, transition: Tensor, plan: RecurrencePlan, group: dist.ProcessGroup
) -> Tensor:
    """The state that enters this rank, zero where none does; a collective over ``group``.

    Args:
        state: what this rank's tokens leave when nothing enters, ``[B, H, K, V]``.
        transition: of all its tokens, ``[B, H, K, K]`` or ``[B, H, 1, 1]``.
    """
    if plan.is_local:
        return torch.zeros_like(state)
    return _CarryState.apply(state, transition, plan, group)


class _CarryState(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, transition, plan, group):
        own = torch.cat([state.flatten(), transition.flatten()])
        states, transitions = StateGather(own, [state.shape, transition.shape], group).wait()
        entering = entering_state(states, transitions, plan)
        if entering is None:
            entering = torch.zeros_like(state)
        ctx.save_for_backward(transitions_after(transitions, plan), entering)
        ctx.plan, ctx.group, ctx.transition_shape = plan, group, transition.shape
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        after, entering = ctx.saved_tensors
        (grads,) = StateGather(grad.flatten(), [grad.shape], ctx.group).wait()
        leaving = leaving_gradient(grads, after, ctx.plan)
        if leaving is None:
            return torch.zeros_like(grad), grad.new_zeros(ctx.transition_shape), None, None
        if ctx.transition_shape[-2:] == (1, 1):
            transition_grad = (leaving * entering).sum((-2, -1), keepdim=True)
        else:
            transition_grad = leaving @ entering.mT
        return leaving, transition_grad, None, None


def _leaving(state: Tensor, transition: Tensor, entering: Tensor | None) -> Tensor:
    """``transition entering + state``; a copy of ``state`` where nothing enters."""
    if entering is None:
        return state.clone()
    if transition.shape[-2:] == (1, 1):
        return torch.addcmul(state, transition, entering)
    matrices = (t.flatten(0, 1) for t in (state, transition, entering))
    return torch.baddbmm(*matrices).view_as(state)
