# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scan over ranks of a linear recurrence whose tokens lie contiguously on them.

Rank r maps a state affinely: ``leaving_r = T_r entering_r + S_r``. S_r is the state that its tokens
leave if a zero state enters, T_r the transition of all its tokens. One all-gather of (S, T), whose
size does not depend on the sequence length, lets every rank compute the state that enters it. The
adjoint is the same scan in reverse: with g_r the gradient of ``entering_r`` through the rank's own
outputs alone, ``grad(leaving_r) = g_{r+1} + T_{r+1}^T grad(leaving_{r+1})``.

States are ``[B, H, K, V]``. A transition is a matrix ``[B, H, K, K]`` that acts from the left, or
one decay a head, ``[B, H, 1, 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.token_layout import RecurrencePlan


class StateGather:
    """An all-gather under way over the CP ranks of states, and of transitions if given.

    Construction starts it; launch work that does not need the result, then call ``wait``.

    Args:
        own: this rank's state, flattened, followed by its transition if there is one.
        shapes: shapes of the state, ``[B, H, K, V]``, and of the transition, ``[B, H, K, K]`` or
            ``[B, H, 1, 1]``.
    """

    def __init__(self, own: Tensor, shapes: Sequence[torch.Size], group: dist.ProcessGroup) -> None:
        self._shapes, self._size = shapes, group.size()
        self._gathered = own.new_empty(self._size * own.numel())
        self._work = dist.all_gather_into_tensor(self._gathered, own, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """States (and transitions) of all ranks, ``[cp, B, H, …]`` each; blocks only the stream."""
        self._work.wait()
        parts = self._gathered.view(self._size, -1).split(
            [shape.numel() for shape in self._shapes], dim=1
        )
        pairs = zip(parts, self._shapes, strict=True)
        return [part.unflatten(1, shape) for part, shape in pairs]


def entering_state(
    states: Tensor, transitions: Tensor, plan: RecurrencePlan
) -> tuple[Tensor | None, Tensor]:
    """The state that enters this rank, ``[B, H, K, V]``; None if its first sample begins here.

    Args:
        states: S of all ranks, ``[cp, B, H, K, V]``.
        transitions: T of all ranks, ``[cp, B, H, K, K]`` or ``[cp, B, H, 1, 1]``.

    Returns:
        The state, and the transitions that :func:`leaving_gradient` needs: a copy, so that the
        gathered tensor, as large as cp states, need not outlive the forward.
    """
    entering, after = None, plan.ranks_after()
    for rank in plan.ranks_before():
        entering = _leaving(states[rank], transitions[rank], entering)
    return entering, transitions[after.start : after.stop].clone()


def leaving_gradient(grads: Tensor, after: Tensor, plan: RecurrencePlan) -> Tensor | None:
    """Gradient of the state that leaves this rank; None if the state enters no other rank.

    Args:
        grads: g of all ranks, ``[cp, B, H, K, V]``: the gradient of the entering state through the
            rank's own outputs alone.
        after: transitions that :func:`entering_state` returned.
    """
    leaving = None
    for rank, transition in reversed([*zip(plan.ranks_after(), after, strict=True)]):
        leaving = _leaving(grads[rank], transition.mT, leaving)
    return leaving


def carry_state(
    state: Tensor, transition: Tensor, plan: RecurrencePlan, group: dist.ProcessGroup
) -> Tensor:
    """The state that enters this rank, or zero if its first sample begins here.

    Collective over ``group``.

    Args:
        state: the state that this rank's tokens leave if zero enters, ``[B, H, K, V]``.
        transition: transition of all its tokens, ``[B, H, K, K]`` or ``[B, H, 1, 1]``.
    """
    if plan.is_local:
        return torch.zeros_like(state)
    return _CarryState.apply(state, transition, plan, group)


class _CarryState(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, transition, plan, group):
        own = torch.cat([state.flatten(), transition.flatten()])
        states, transitions = StateGather(own, [state.shape, transition.shape], group).wait()
        entering, after = entering_state(states, transitions, plan)
        if entering is None:
            entering = torch.zeros_like(state)
        ctx.save_for_backward(after, entering)
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
    """Compute ``transition · entering + state``; a copy of ``state`` if ``entering`` is None."""
    if entering is None:
        return state.clone()
    if transition.shape[-2:] == (1, 1):
        return torch.addcmul(state, transition, entering)
    matrices = (t.flatten(0, 1) for t in (state, transition, entering))
    return torch.baddbmm(*matrices).view_as(state)
