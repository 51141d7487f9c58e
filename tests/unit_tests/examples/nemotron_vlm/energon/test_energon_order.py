# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sample numbers: every sample once an epoch, and blends in proportion."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.mimo.nemotron_vlm.energon.order import Order, blend


def epoch(order: Order, number: int) -> np.ndarray:
    size = order.epoch_size
    return order.locate(np.arange(number * size, (number + 1) * size))[1]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(2, 900), st.sampled_from([0.5, 1, 1.5, 3])), min_size=1),
    st.integers(0, 2**40),
    st.integers(0, 10**6),
)
def test_an_epoch_repeats_each_data_set_as_often_as_asked(drawn, seed, number):
    sizes, times = zip(*drawn, strict=True)
    order = Order(list(sizes), False, list(times), seed)
    counts = [int(each * size) for size, each in drawn]
    assert order.epoch_size == sum(counts)
    for epochs in (1, 2):
        numbers = np.arange(number * sum(counts), (number + epochs) * sum(counts))
        dataset, sample = order.locate(numbers)
        for place, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            found = np.bincount(sample[dataset == place], minlength=size)
            assert found.sum() == epochs * count and np.ptp(found) <= 1


def test_epochs_and_seeds_have_orders_of_their_own_which_do_not_change():
    """A resumed run must find the order of the version that began it."""
    first, second = (Order([500], False, [None], seed) for seed in (1, 2))
    orders = [epoch(first, 0), epoch(first, 1), epoch(second, 0), np.arange(500)]
    for place, one in enumerate(orders):
        for other in orders[:place]:
            assert (one == other).mean() < 0.02
    assert epoch(Order([12], False, [None], (0, "train")), 0).tolist() == [
        11, 7, 0, 8, 3, 10, 2, 1, 9, 5, 6, 4,
    ]  # fmt: skip


@settings(deadline=None, max_examples=8)
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=7))
def test_any_beginning_of_a_blend_has_each_share_within_one_sample(weights):
    shares, dataset, rank = blend(weights)
    drawn = (dataset == np.arange(len(weights))[:, None]).cumsum(axis=1)
    wanted = shares[:, None] / shares.sum() * np.arange(1, len(dataset) + 1)
    assert np.abs(drawn - wanted).max() < 1
    assert np.array_equal(rank, drawn[dataset, np.arange(len(dataset))] - 1)
    assert np.allclose(shares / shares.sum(), np.array(weights) / sum(weights), atol=1e-3)


def test_each_data_set_goes_through_its_own_epochs_and_gives_a_sample():
    assert blend([0.7, 0.3])[0].tolist() == [7, 3], "simple weights are exact"
    order = Order([10, 4], True, [3.0, 1.0], 0)
    assert order.epoch_size is None
    pieces = [order.locate(np.arange(i, i + 40)) for i in range(0, 400, 40)]
    dataset, sample = np.concatenate(pieces, axis=1)
    for number, size in ((0, 10), (1, 4)):
        drawn = sample[dataset == number]
        for first in range(0, len(drawn) - size, size):
            assert sorted(drawn[first : first + size]) == list(range(size))
    with pytest.raises(ValueError, match="must be positive"):
        Order([6, 4], True, [1.0, 0.0], 0)
    with pytest.raises(ValueError, match="less than one"):
        Order([6, 4], False, [1, 0.1], 0)
