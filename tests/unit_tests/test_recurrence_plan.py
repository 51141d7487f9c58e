# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of recurrent layers under CP: who passes states to whom."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.token_layout import (
    PaddedLengths,
    contiguous_layout,
    zigzag_layout,
)
from megatron.core.token_layout.recurrence_plan import plan_recurrence
from tests.unit_tests.test_token_layout import cp_sizes, exchange_in_one_process, plans

# Any lengths: a recurrence asks for no multiple but of the whole.
any_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=6)


def recurrence_plans(lengths, cp_size):
    """The plans of all ranks, and the sample of each token of a row.

    Lengths are padded to fit: a sample alone as zigzag tokens, several as contiguous ones.
    """
    is_zigzag, device = len(lengths) == 1, torch.device("cpu")
    multiple = 2 * cp_size if is_zigzag else cp_size
    lengths = [*lengths[:-1], lengths[-1] + max(0, 1 - sum(lengths))]
    lengths[-1] += -sum(lengths) % multiple
    rows = 3 if is_zigzag else 1
    padded = PaddedLengths(tuple(rows * lengths), tuple(rows * lengths))
    plans = [plan_recurrence(padded, cp_size, rank, device, is_zigzag) for rank in range(cp_size)]
    assert {plan.parts for plan in plans} == {1 + is_zigzag}
    return plans, [number for number, length in enumerate(lengths) for _ in range(length)]


class TestRecurrencePlan:
    @given(any_lengths, cp_sizes)
    @plans
    def test_the_links_are_those_of_the_layout(self, lengths, cp_size):
        ranks, samples = recurrence_plans(lengths, cp_size)
        layout = zigzag_layout if ranks[0].is_zigzag else contiguous_layout
        for plan in ranks:
            tokens = layout(plan.lengths, cp_size).tokens[plan.rank]
            links = plan.by_link(tokens.unsqueeze(0)) % len(samples)
            assert torch.equal(plan.whole(links)[0], tokens % len(samples))
            firsts = [link * plan.link_size for link in plan.own]
            expected = [range(first, first + plan.link_size) for first in firsts]
            rows = plan.lengths.total // len(samples)
            assert links.tolist() == [list(tokens) for tokens in expected] * rows

    @given(any_lengths, cp_sizes)
    @plans
    def test_a_state_enters_from_the_links_that_hold_earlier_tokens_of_the_sample(
        self, lengths, cp_size
    ):
        ranks, samples = recurrence_plans(lengths, cp_size)
        size = ranks[0].link_size
        for plan in ranks:
            first = plan.own[-1] * size
            holders = {t // size for t in range(first) if samples[t] == samples[first]}
            assert set(plan.links_before()) == holders
            last = (plan.own[0] + 1) * size - 1
            after = range(last + 1, len(samples))
            holders = {t // size for t in after if samples[t] == samples[last]}
            assert set(plan.links_after()) == holders
            for link in plan.own:
                ends = link * size, (link + 1) * size - 1
                assert plan.crosses[link] == (samples[ends[0]] == samples[ends[1]])
        assert ranks[0].is_local == (not any(plan.links_before() for plan in ranks))

    @given(any_lengths, cp_sizes)
    @plans
    def test_samples_within_a_link_are_told_apart_from_0_on(self, lengths, cp_size):
        ranks, samples = recurrence_plans(lengths, cp_size)
        for plan in ranks:
            for link in plan.own:
                own = samples[link * plan.link_size :][: plan.link_size]
                numbers = {sample: number for number, sample in enumerate(dict.fromkeys(own))}
                expected = [numbers[sample] for sample in own]
                if plan.seq_idx is None:
                    assert set(expected) == {0}
                else:
                    assert plan.seq_idx.tolist() == [expected]
                counts = plan.cu_seqlens.diff().tolist()
                assert counts == [expected.count(number) for number in numbers.values()]

    @given(any_lengths, cp_sizes, st.integers(1, 4))
    @plans
    def test_the_halo_holds_the_tokens_that_a_window_sees(self, lengths, cp_size, reach):
        ranks, samples = recurrence_plans(lengths, cp_size)
        size, halos = ranks[0].link_size, [plan.halo(reach) for plan in ranks]
        # Tokens are counted from 1; a halo has 0 where there is no token.
        last = [
            torch.cat([torch.arange(1, (k + 1) * size + 1)[-halos[0].kept :] for k in plan.own])
            for plan in ranks
        ]
        found = exchange_in_one_process(last, [halo.route for halo in halos], nothing=0)
        users = Counter()
        for plan, tokens in zip(ranks, found, strict=True):
            expected = []
            for first in (link * size for link in plan.own):
                before = range(first - reach, first)
                seen = [t >= 0 and samples[t] == samples[first] for t in before]
                expected += [(t + 1) * is_seen for t, is_seen in zip(before, seen, strict=True)]
            assert tokens.tolist() == expected
            users.update(filter(None, expected))
        # The adjoint sends each token's gradients back to its owner, where they add up.
        returned = exchange_in_one_process(found, [halo.adjoint for halo in halos], nothing=0)
        for tokens, sums in zip(last, returned, strict=True):
            assert sums.tolist() == [token * users[token] for token in tokens.tolist()]
        assert halos[0].route.is_local == halos[0].adjoint.is_local == (not users)
