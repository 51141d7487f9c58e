# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sample numbers: every sample once an epoch, also of runs that go on, and blends in proportion."""

from argparse import Namespace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.mimo.common.layout import Batch, Layout, Layouts
from examples.mimo.common.steps import training_steps
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.energon import stream
from examples.mimo.nemotron_vlm.energon.order import Order, blend
from examples.mimo.nemotron_vlm.energon.stream import Stream
from examples.mimo.nemotron_vlm.energon.survey import MEDIA, Survey
from tests.unit_tests.examples.nemotron_vlm.data.images_alone import step_plan

SEQ_LENGTH = 4096


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


class Varied(SampleSource):
    """Samples of varied lengths; half have 90 tokens or fewer."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(0).lognormal(4.5, 1.7, 10_000).astype(np.int64) + 2
        self.tokens, self.asked = np.minimum(drawn, SEQ_LENGTH), []

    def costs(self, split, first, number):
        self.asked.append(first)
        tokens = self.tokens[first : first + number]
        return np.stack([tokens, np.zeros_like(tokens)], axis=1)


def test_runs_that_go_on_with_packed_rows_read_every_sample_once():
    """Runs of one, two and three DP ranks, the first three also of other batches."""
    state = Namespace(consumed_train_samples=0, window_start=(0, 0))
    state.micro_batch_size, state.step_batch_size_schedule = 1, None
    source, packing, numbers = Varied(), Packing(), []
    for dp, size in zip((1, 2, 3) * 4, (12, 18, 6, *[12] * 9), strict=True):
        state.global_batch_size, first = size, state.window_start
        layouts = Layouts((Layout(dp=dp),), Layout(dp=dp), Batch(size, 1, SEQ_LENGTH))
        source.asked.clear()
        for rank in range(dp):
            plan = step_plan(layouts, rank, rank)
            rows = Rows(source, "train", SEQ_LENGTH, packing, start=first)
            for step in islice(training_steps(state, dp), 4):
                takes = plan.takes(rows, *step)
                numbers += [number for take in takes for row in take.rows for number in row]
        assert min(source.asked) == first[0] * packing.window, "samples before are not looked at"
        state.window_start = rows.window_of(step[0])
        state.consumed_train_samples += 4 * size
    whole = state.window_start[0] * packing.window
    assert whole > 4000 and len(numbers) == len(set(numbers))
    assert set(range(whole)) <= set(numbers)
