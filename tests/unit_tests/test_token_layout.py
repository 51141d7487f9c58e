# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Context-parallel layouts, the routes between them, and the exchange along a route."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.token_layout import (
    PaddedLengths,
    contiguous_layout,
    exchange,
    gather_tokens,
    pad_lengths,
    plan_route,
    zigzag_layout,
    zigzag_owners,
)
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils, requires_world_size

# Odd, below 2·cp, empty, and long samples.
ODD_LENGTHS = (5, 0, 1, 37, 16, 3)

lengths_of_samples = st.lists(st.integers(0, 70), max_size=6)
cp_sizes = st.sampled_from((1, 2, 3, 4, 5, 8, 16))
# Shrinking a failing plan can be slow on a busy machine; a deadline would hide the failure.
plans = settings(deadline=None, max_examples=60)


def zigzag_tokens(padded, cp_size, group_rank):
    """Oracle: list the half-chunks of each sample, and pick two."""
    tokens, start = [], 0
    for length in padded:
        sample = list(range(start, start + length))
        half = length // (2 * cp_size)
        chunks = [sample[i * half : (i + 1) * half] for i in range(2 * cp_size)]
        tokens += chunks[group_rank] + chunks[2 * cp_size - 1 - group_rank]
        start += length
    return tokens


def exchange_in_one_process(shards, routes, nothing=-1):
    """Do what the all-to-all of every rank would do, message by message.

    Places that get nothing have the value ``nothing``.
    """
    outboxes = [
        shard[route.send_places].split(route.send_splits)
        for shard, route in zip(shards, routes, strict=True)
    ]
    moved = []
    for rank, (shard, route) in enumerate(zip(shards, routes, strict=True)):
        inbox = [outbox[rank] for outbox in outboxes]
        assert tuple(map(len, inbox)) == route.recv_splits
        result = torch.full((route.addends * route.size,), nothing)
        result[route.recv_places] = torch.cat(inbox)
        result[route.kept_to] = shard[route.kept_from]
        moved.append(result.view(route.addends, route.size).sum(0))
    return moved


class TestPadding:
    @given(lengths_of_samples, cp_sizes, st.sampled_from((1, 2, 4)))
    @plans
    def test_padding_is_the_least_that_fits_and_never_truncates(self, lengths, cp_size, tp_size):
        padded = pad_lengths(lengths, cp_size, tp_size)
        multiple = 2 * cp_size if cp_size > 1 else 1
        added = [p - r for p, r in zip(padded.padded, padded.real, strict=True)]
        assert padded.real == tuple(lengths)
        assert all(length % multiple == 0 for length in padded.padded)
        assert all(0 <= extra < multiple for extra in added[:-1])
        assert all(0 <= extra < multiple * tp_size for extra in added[-1:])
        assert padded.total % (cp_size * tp_size) == 0

    @given(lengths_of_samples, cp_sizes)
    @plans
    def test_mask_tells_real_tokens_from_padding_which_is_filled(self, lengths, cp):
        padded = pad_lengths(lengths, cp)
        ragged = [range(length) for length in padded.padded]
        valid = [p < real for real, sample in zip(lengths, ragged, strict=True) for p in sample]
        assert padded.valid.tolist() == valid
        real = torch.arange(2 * sum(lengths)).view(2, -1)
        spread = padded.pad(real, dim=1, value=-100)
        assert torch.equal(spread[:, padded.valid], real)
        assert (spread[:, ~padded.valid] == -100).all()

    def test_packed_seq_params_hold_global_boundaries(self):
        """They are made and read without waiting for the device."""
        lengths = pad_lengths([5, 0, 9], cp_size=2)
        with no_host_sync():
            params = lengths.packed_seq_params(Utils.device)
            assert PaddedLengths.of_packed(params) == lengths
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q.tolist() == [0, 5, 5, 14]
        assert params.cu_seqlens_q_padded.tolist() == [0, 8, 8, 20]
        assert params.max_seqlen_q == 12
        assert params.total_tokens == 20
        assert params.seq_idx.tolist() == [[0] * 8 + [2] * 12]
        assert params.seq_idx.dtype == torch.int32


class TestLayouts:
    @given(lengths_of_samples, cp_sizes, st.sampled_from((1, 2, 4)))
    @plans
    def test_zigzag_holds_first_and_second_half_chunk_of_each_sample(self, lengths, cp, tp):
        """A CP rank cuts them into a run for each TP rank; `zigzag_owners` finds these owners."""
        padded = pad_lengths(lengths, cp, tp)
        layout = zigzag_layout(padded, cp)
        expected = [list(range(padded.total))]
        if cp > 1:
            expected = [zigzag_tokens(padded.padded, cp, rank) for rank in range(cp)]
        assert layout.tokens.tolist() == expected
        together = layout.over_tensor_ranks(tp).tokens.view(cp, tp, -1).flatten(1)
        assert torch.equal(together, layout.tokens)
        owners = (layout.places // max(layout.shard_size, 1))[padded.valid]
        assert zigzag_owners(padded, cp).tolist() == owners.tolist()


class TestRoutes:
    @given(lengths_of_samples, cp_sizes, st.sampled_from((1, 2, 4)))
    @plans
    def test_every_token_arrives_and_the_way_back_restores_it(self, lengths, cp_size, tp_size):
        """Over CP ranks, and over the TP ranks that each cuts its shard for."""
        padded = pad_lengths(lengths, cp_size, tp_size)
        layouts = (zigzag_layout(padded, cp_size), contiguous_layout(padded, cp_size))
        source, destination = (layout.over_tensor_ranks(tp_size) for layout in layouts)
        routes = [plan_route(source, destination, rank) for rank in range(source.cp_size)]
        moved = exchange_in_one_process(list(source.tokens), routes)
        assert torch.equal(torch.stack(moved), destination.tokens)
        back = exchange_in_one_process(moved, [route.reversed() for route in routes])
        assert torch.equal(torch.stack(back), source.tokens)


ZIGZAG = zigzag_layout(pad_lengths([5], 2), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pad_lengths([4, -1], 2), r"got real=\(4, -1\)"),
        (lambda: zigzag_layout(PaddedLengths((8, 10), (8, 10)), 2), r"of 4, got \(8, 10\)"),
        (lambda: ZIGZAG.shard(torch.zeros(5), 0), "8 padded tokens, but dim 0 .* has 5"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@requires_world_size(4)
@pytest.mark.parametrize("cp_size", (4, 3, 2))
def test_exchange_and_gather_are_exact_and_so_are_their_gradients(group, cp_size):
    """Nothing waits for the device."""
    if group is None:
        return
    lengths = pad_lengths(ODD_LENGTHS, cp_size)
    source, destination = zigzag_layout(lengths, cp_size), contiguous_layout(lengths, cp_size)
    route = plan_route(source, destination, group.rank()).to(Utils.device)
    layout = source.to(Utils.device)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(source.lengths.total, 2, 3, generator=generator).to(Utils.device)
    shard, moved = (each.shard(batch, group.rank()) for each in (source, destination))
    shard.requires_grad_()
    with no_host_sync():
        found = exchange(shard, route, group)
        found.backward(moved)
        back = exchange(found, route.reversed(), group)
    assert torch.equal(found, moved)
    assert torch.equal(back, shard)
    assert torch.equal(shard.grad, shard)
    shard.grad = None
    with no_host_sync():
        gathered = gather_tokens(shard, layout, group)
        # Rank r weights every token by r + 1: integers, so the sum is exact.
        gathered.backward(torch.full_like(gathered, group.rank() + 1))
    assert torch.equal(gathered, batch)
    assert (shard.grad == cp_size * (cp_size + 1) / 2).all()
