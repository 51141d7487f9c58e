# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The scan over ranks, all ranks in one process: any lengths, any CP size, fp64 to 1e-10."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.ssm.ops.reference import chunk_gated_delta_rule
from megatron.core.ssm.state_passing.scan_over_ranks import (
    entering_state,
    leaving_gradient,
)
from megatron.core.token_layout import PaddedLengths, RecurrencePlan, plan_recurrence

# Shrinking a failing case can be slow on a busy machine; a deadline would hide the failure.
cases = settings(deadline=None, max_examples=40)
any_lengths = st.lists(st.integers(0, 20), min_size=1, max_size=5)
cp_sizes = st.sampled_from((1, 2, 3, 4, 5, 8, 16))
CHUNK = 4


def plans_of(lengths: list[int], cp_size: int) -> list[RecurrencePlan]:
    """Plans of all ranks; the last sample is lengthened until the total divides."""
    total = max(sum(lengths), 1)
    last = lengths[-1] + max(0, 1 - sum(lengths)) + -total % cp_size
    padded = PaddedLengths((*lengths[:-1], last), (*lengths[:-1], last))
    return [plan_recurrence(padded, cp_size, r, torch.device("cpu")) for r in range(cp_size)]


def over_ranks(scan, inputs: list[Tensor], plans: list[RecurrencePlan]) -> Tensor:
    """Run ``scan`` on each rank's tokens in turn; a rank sees the states of those before it."""
    states, transitions, outputs = [], [], []
    for plan in plans:

        def enter(state, transition, plan=plan):
            states.append(state)
            transitions.append(transition)
            entering, _ = entering_state(torch.stack(states), torch.stack(transitions), plan)
            return torch.zeros_like(state) if entering is None else entering

        own = slice(plan.rank * plan.shard_size, (plan.rank + 1) * plan.shard_size)
        outputs.append(scan(*(t[:, own] for t in inputs), seq_idx=plan.seq_idx, enter=enter))
    return torch.cat(outputs, dim=1)


def assert_equals_whole(scan, inputs: list[Tensor], plans: list[RecurrencePlan]) -> None:
    leaves = [t.requires_grad_() for t in inputs]
    lengths = torch.tensor(plans[0].lengths.padded)
    seq_idx = torch.arange(len(lengths)).repeat_interleave(lengths).unsqueeze(0)
    expected = scan(*leaves, seq_idx=seq_idx, enter=None)
    found = over_ranks(scan, leaves, plans)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=seeded())
    for a, b in zip(
        torch.autograd.grad(found, leaves, weight),
        torch.autograd.grad(expected, leaves, weight),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


class TestScanOverRanks:
    @given(any_lengths, cp_sizes, st.sampled_from((1, 3)))
    @cases
    def test_the_gated_delta_rule_equals_the_whole_row(self, lengths, cp_size, heads):
        plans = plans_of(lengths, cp_size)
        rows, rng = (1, plans[0].lengths.total), seeded()

        def normal(*shape):
            return torch.randn(*rows, heads, *shape, dtype=torch.float64, generator=rng)

        def scan(q, k, v, g, beta, seq_idx, enter):
            return chunk_gated_delta_rule(
                q, k, v, -g.square() / 8, beta.sigmoid(), seq_idx=seq_idx, enter=enter,
                chunk_size=CHUNK, use_qk_l2norm_in_kernel=True,
            )[0]  # fmt: skip

        assert_equals_whole(scan, [normal(3), normal(3), normal(2), normal(), normal()], plans)

    @given(any_lengths, cp_sizes, st.sampled_from((1, 3)))
    @cases
    def test_the_gradient_of_a_leaving_state_is_the_adjoint(self, lengths, cp_size, size):
        """Decays (1×1) and matrices (3×3) agree with autograd through the scan of all ranks."""
        plans, rng = plans_of(lengths, cp_size), seeded()

        def normal(*shape):
            return torch.randn(cp_size, 1, 2, *shape, dtype=torch.float64, generator=rng)

        states, transitions, grads = normal(3, 2), normal(size, size), normal(3, 2)
        states.requires_grad_()
        total = states.sum() * 0
        for plan in plans:
            entering, _ = entering_state(states, transitions, plan)
            if entering is not None:
                total = total + (entering * grads[plan.rank]).sum()
        (expected,) = torch.autograd.grad(total, states)
        for plan in plans:
            _, after = entering_state(states, transitions, plan)
            found = leaving_gradient(grads, after, plan)
            found = torch.zeros_like(expected[0]) if found is None else found
            torch.testing.assert_close(found, expected[plan.rank], rtol=0, atol=1e-10)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
