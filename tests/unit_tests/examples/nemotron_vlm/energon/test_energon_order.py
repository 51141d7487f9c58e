# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sample numbers: every sample once an epoch, and blends in proportion."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.mimo.nemotron_vlm.energon import stream
from examples.mimo.nemotron_vlm.energon.order import Order, blend
from examples.mimo.nemotron_vlm.energon.stream import Stream
from examples.mimo.nemotron_vlm.energon.survey import MEDIA, Survey


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


def test_each_data_set_goes_through_its_own_epochs():
    assert blend([0.7, 0.3])[0].tolist() == [7, 3], "simple weights are exact"
    order = Order([10, 4], True, [3.0, 1.0], 0)
    assert order.epoch_size is None
    pieces = [order.locate(np.arange(i, i + 40)) for i in range(0, 400, 40)]
    dataset, sample = np.concatenate(pieces, axis=1)
    for number, size in ((0, 10), (1, 4)):
        drawn = sample[dataset == number]
        for first in range(0, len(drawn) - size, size):
            assert sorted(drawn[first : first + size]) == list(range(size))


@pytest.mark.parametrize(
    ("sizes", "by_weight", "weights", "text"),
    [
        ([6, 4], True, [1.0, 0.0], "must be positive"),
        ([6, 4], False, [1, 0.1], "less than one"),
    ],
)
def test_what_gives_no_sample_is_refused(sizes, by_weight, weights, text):
    with pytest.raises(ValueError, match=text):
        Order(sizes, by_weight, weights, 0)


def stream_of(states: np.ndarray, tokens: np.ndarray, taken: range, seq_length: int) -> Stream:
    """Number the samples that a blend takes from one data set; states are int32 [n]."""
    table = [states, tokens, *np.zeros((5, len(states)), np.int32)]
    survey = Survey(*table, np.zeros(0, MEDIA), "hash", None)
    pairs = [(SimpleNamespace(subset=taken, weight=None, path="data"), survey)]
    return Stream(pairs, False, seq_length, (0, "train"), False)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([0, 0, 0, 3, 5, 90]), min_size=1, max_size=60), st.data())
def test_numbers_skip_bad_and_long_samples_in_the_part_that_a_blend_takes(kinds, draw):
    """A state, or 90 tokens; read a few samples at a time."""
    first = draw.draw(st.integers(0, len(kinds) - 1))
    taken = range(first, draw.draw(st.integers(first + 1, len(kinds))))
    states = np.array([kind % 90 for kind in kinds], np.int32)
    tokens = np.array([max(kind, 10) for kind in kinds], np.int32)
    good = [index for index in taken if kinds[index] == 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PART", 7)
        if not good:
            with pytest.raises(ValueError, match=f"none of {len(taken)} samples of train"):
                stream_of(states, tokens, taken, 64)
            return
        opened = stream_of(states, tokens, taken, 64)
    assert sorted(opened.locate(number)[1] for number in range(len(good))) == good
    assert opened.left_out.total() == len(taken) - len(good)
    assert opened.left_out["too long"] == sum(kinds[index] == 90 for index in taken)
