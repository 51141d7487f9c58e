# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scan over ranks of a linear recurrence, whose tokens are chains of links on them.

Link i maps a state affinely: ``leaving_i = T_i entering_i + S_i``. S_i is the state that its tokens
leave if a zero state enters, T_i the transition of all its tokens. One all-gather of (S, T), whose
size does not depend on the sequence length, lets every rank compute the states that enter its
links. The adjoint is the same scan in reverse: with g_i the gradient of ``entering_i`` through the
link's own outputs alone, ``grad(leaving_i) = g_{i+1} + T_{i+1}^T grad(leaving_{i+1})``.

States are ``[B, H, K, V]`` for the B links of a rank: one or two of each chain
(:class:`RecurrencePlan`). A transition is a matrix ``[B, H, K, K]`` that acts from the left, or one
decay a head, ``[B, H, 1, 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.token_layout.recurrence_plan import RecurrencePlan


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
    """The states that enter this rank's links, ``[B, H, K, V]``; None if none enters any.

    Args:
        states: S of all ranks, ``[cp, B, H, K, V]``.
        transitions: T of all ranks, ``[cp, B, H, K, K]`` or ``[cp, B, H, 1, 1]``.

    Returns:
        The states, and the transitions that :func:`leaving_gradient` needs: a copy, so that the
        gathered tensor, as large as all ranks' states, need not outlive the forward.
    """
    state, transition = plan.by_link_of_chain(states), plan.by_link_of_chain(transitions)
    entering, carried = {}, None
    for link in plan.links_before():
        entering[link] = carried
        carried = _leaving(state[link], transition[link], carried)
    entering[plan.own[-1]] = carried
    after = [transition[link] for link in plan.links_after()]
    return _joined(entering, plan), torch.stack(after) if after else transitions.new_empty(0)


def leaving_gradient(grads: Tensor, after: Tensor, plan: RecurrencePlan) -> Tensor | None:
    """Gradient of the states that leave this rank's links; None if none enters another link.

    Args:
        grads: g of all ranks, ``[cp, B, H, K, V]``: the gradient of the entering states through
            each link's own outputs alone.
        after: transitions that :func:`entering_state` returned.
    """
    grad, leaving, carried = plan.by_link_of_chain(grads), {}, None
    for link, transition in reversed([*zip(plan.links_after(), after, strict=True)]):
        leaving[link] = carried
        carried = _leaving(grad[link], transition.mT, carried)
    leaving[plan.own[0]] = carried
    return _joined(leaving, plan)


def carry_state(
    state: Tensor, transition: Tensor, plan: RecurrencePlan, group: dist.ProcessGroup
) -> Tensor:
    """The states that enter this rank's links, zero where a sample begins.

    Collective over ``group``.

    Args:
        state: the states that its links' tokens leave if zero enters, ``[B, H, K, V]``.
        transition: transitions of all their tokens, ``[B, H, K, K]`` or ``[B, H, 1, 1]``.
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


def _joined(found: dict[int, Tensor | None], plan: RecurrencePlan) -> Tensor | None:
    """States of this rank's links in one tensor, ``[B, H, K, V]``, with zeros for None."""
    own = [found.get(link) for link in plan.own]
    known = next((state for state in own if state is not None), None)
    if known is None or plan.parts == 1:
        return known
    own = [torch.zeros_like(known) if state is None else state for state in own]
    return torch.stack(own, dim=1).flatten(0, 1)


def _leaving(state: Tensor, transition: Tensor, entering: Tensor | None) -> Tensor:
    """Compute ``transition · entering + state``; a copy of ``state`` if ``entering`` is None."""
    if entering is None:
        return state.clone()
    if transition.shape[-2:] == (1, 1):
        return torch.addcmul(state, transition, entering)
    matrices = (t.flatten(0, 1) for t in (state, transition, entering))
    return torch.baddbmm(*matrices).view_as(state)
