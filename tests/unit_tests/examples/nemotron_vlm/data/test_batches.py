# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples that ranks read for a step: each once, in the bridge's order, and evenly spread."""

import functools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.mimo.common.layout import COLOCATED, NON_COLOCATED, Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.balance import assign_rows, cut_evenly, in_turns
from examples.mimo.nemotron_vlm.data.digits import DigitStrips
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows, best_fit
from examples.mimo.nemotron_vlm.data.step_plan import Share, StepPlan, StepWork, Take
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.model.presets import nano_vl_30b_a3b, tiny
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

SEQ_LENGTH = 32
TINY, NANO = tiny(), nano_vl_30b_a3b().with_images_of_any_size()


class VariedSamples(SampleSource):
    """Many small samples, few with a dozen tiles, some of text alone; nothing to read."""

    def costs(self, split, first, count):
        return np.array([drawn_cost(split, n) for n in range(first, first + count)]).reshape(-1, 2)


@functools.cache
def drawn_cost(split: str, number: int) -> tuple[int, int]:
    """Tokens and tiles of a sample; every rank of a plan asks for them."""
    draw = np.random.default_rng([7, split == "test", number])
    tiles = int(draw.choice([0, 1, 2, 3, 12], p=[0.1, 0.5, 0.2, 0.15, 0.05]))
    return tiles * 16 + int(draw.integers(5, 60)), tiles


def step_plan(layouts, part, dp, *rest, preset=TINY) -> StepPlan:
    """The plan of a rank that encodes a part, and consumes on a DP rank."""
    width = preset.language.hidden_size
    return StepPlan(layouts, preset.encoders, {IMAGES: part}, dp, width, *rest)


class TestRows:
    @given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 80))
    def test_best_fit_loses_nothing_and_overfills_nothing(self, lengths, capacity):
        bins = best_fit(lengths, capacity)
        assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in items) <= capacity for items in bins)
        assert len(bins) <= max(1, 2 * sum(lengths) // capacity + 1)  # no two bins fit into one

    def test_a_sample_that_no_row_holds_is_refused(self):
        with pytest.raises(ValueError, match="a sample of 81 tokens does not fit a row of 80"):
            best_fit([3, 81], 80)


@st.composite
def steps(draw):
    dp, micro = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    count = draw(st.integers(1, 4))
    placement = draw(st.sampled_from([COLOCATED, NON_COLOCATED]))
    parts = draw(st.integers(1, 6))
    if placement == NON_COLOCATED:
        parts = draw(st.sampled_from([n for n in range(1, dp * micro + 1) if dp * micro % n == 0]))
    macro_batch = draw(st.sampled_from([1, 2, 3, None]))
    packing = draw(st.sampled_from([None, Packing(window=32, multiple=8)]))
    micro = 1 if packing and placement == COLOCATED else micro
    batch = Batch(dp * micro * count, 1, SEQ_LENGTH)
    layouts = Layouts((Layout(dp=parts),), Layout(dp=dp), batch, placement)
    return layouts, Rows(VariedSamples(), "train", 512, packing), count, micro, macro_batch


@settings(deadline=None, max_examples=100)
@given(steps(), st.booleans())
def test_rows_are_read_and_tiles_encoded_once_in_one_order_of_atoms(drawn, balanced):
    """The encoder's parts are consecutive in the order of the language model, and both sides of a
    colocated bridge agree on the rows of each atom."""
    layouts, rows, count, micro, macro_batch = drawn
    parts, dp = layouts.encoder.dp, layouts.language.dp
    if layouts.non_colocated:
        ranks = [(part, None) for part in range(parts)] + [(None, rank) for rank in range(dp)]
    else:
        ranks = [(part, part * dp // parts) for part in range(parts)]
        ranks += [(rank * parts // dp, rank) for rank in range(dp)]
    schedule, found = EncoderSchedule(macro_batch or count), {}
    for rank in ranks:
        found[rank] = [*step_plan(layouts, *rank, balanced, schedule).takes(rows, 5, count, micro)]
    made = {part: takes for (part, _), takes in found.items() if part is not None}
    used = {lang: takes for (_, lang), takes in found.items() if lang is not None}
    assert sorted(made) == list(range(parts))
    read = [tuple(row) for takes in used.values() for take in takes for row in take.rows]
    assert Counter(read) == Counter(map(tuple, rows.samples(5, dp * micro * count)))
    size = 1 if layouts.non_colocated else macro_batch or count
    for numbers in (range(count)[first : first + size] for first in range(0, count, size)):
        order = [
            s for lang in range(dp) for n in numbers for row in used[lang][n].rows for s in row
        ]
        tiles = {s: int(rows.source.costs("train", s, 1)[0, 1]) for s in order}
        shares = [made[part][n].shares[IMAGES] for part in range(parts) for n in numbers]
        encoded = [p for share in shares for p in share.ranges or []]
        expected = [(s, tile) for s in order for tile in range(tiles[s])]
        assert [(p.sample, t) for p in encoded for t in range(p.first, p.end)] == expected
        if not layouts.non_colocated:
            atoms = atoms_of(made, "encoded", numbers)
            assert atoms == atoms_of(used, "consumed", numbers)
            assert len(atoms) == np.lcm(parts, dp)


def atoms_of(takes: dict[int, list[Take]], side: str, numbers: range) -> list[int]:
    """Rows of each atom in some microbatches, rank by rank."""
    shares = [
        [getattr(takes[rank][n].shares[IMAGES], side) for n in numbers] for rank in sorted(takes)
    ]
    return [int(rows) for share in shares for rows in np.sum(share, axis=0)]


class Photographs(SampleSource):
    """One or two images a sample, from small ones to the largest, and a text of any length."""

    def sizes(self, split, first, count, encoder):
        drawn = (np.random.default_rng([n, 1]) for n in range(first, first + count))
        shapes = (np.exp(draw.uniform(5, 7.6, size=(draw.integers(1, 3), 2))) for draw in drawn)
        return [np.array([NANO.images.grids.size_of(h, w) for h, w in each]) for each in shapes]

    def costs(self, split, first, count):
        texts = (np.random.default_rng([n, 2]).integers(2000) for n in range(first, first + count))
        sizes = self.sizes(split, first, count, IMAGES)
        rows = [NANO.images.rows(each).sum() for each in sizes]
        return np.array([*zip(np.add(rows, [*texts]), map(len, sizes), strict=True)])


class TestBalance:
    @pytest.mark.parametrize("parts", [8, 16])
    def test_the_busiest_rank_of_either_module_has_5_percent_more_at_most(self, parts):
        """Rows are packed, as models of 8192 tokens have them; the stream's order is far worse.

        The attention of a microbatch's rows is nearly the same, as its ranks wait for each other.
        """
        rows, dp = Rows(Photographs(), "train", 8192, Packing(256, 8)), 8
        layouts = Layouts((Layout(dp=parts),), Layout(dp=dp, pp=2), Batch(128, 1, 8192))
        width, worst, unequal = NANO.language.hidden_size, {}, {}
        for balance in (True, False):
            work, attention = [], {}
            for part in range(parts):
                lang = part * dp // parts
                plan = step_plan(layouts, part, lang, balance, EncoderSchedule(16), preset=NANO)
                takes = list(plan.takes(rows, 0, 16, 1))
                ranges = [one for take in takes for one in take.shares[IMAGES].ranges]
                sizes = [
                    rows.source.sizes("train", one.sample, 1, IMAGES)[0][one.first : one.end]
                    for one in ranges
                ]
                work.append(NANO.images.operations(np.concatenate(sizes), width))
                attention[lang] = [(rows.tokens(take.rows)[0] ** 2.0).sum() for take in takes]
            loads = [*map(sum, work)], [*map(sum, attention.values())]
            worst[balance] = [max(each) / np.mean(each) for each in loads]
            unequal[balance] = np.ptp(list(attention.values()), axis=0).sum()
        assert worst[True][0] < 1.01, "ranks exchange rows after each has its own"
        assert worst[True][1] < 1.05 < min(worst[False])
        assert unequal[True] < unequal[False] / 6

    @pytest.mark.parametrize("count", [7, 8])
    def test_microbatches_with_much_work_and_with_little_take_turns(self, count):
        drawn = np.random.default_rng(0).lognormal(9, 1, size=2 * count).astype(int)
        placed = in_turns(assign_rows(np.zeros(2 * count), drawn, count, 2), drawn)
        work = drawn[placed].sum(axis=(1, 2))
        assert sorted(placed.flat) == list(range(2 * count))
        falls, rises = np.diff(work)[::2], np.diff(work)[1::2]
        assert (falls < 0).all() and (rises > 0).all()
        assert sorted(work[-2:]) == [work.min(), work.max()]

    @given(st.lists(st.integers(1, 60), max_size=12), st.integers(1, 5))
    def test_inputs_are_cut_where_it_is_nearest_to_even(self, weights, parts):
        """A large image first, beside a small one, must not leave both to the last rank."""
        ends = np.cumsum([0, *weights])
        bounds = cut_evenly(weights, parts)
        even = ends[-1] * np.arange(parts + 1) / parts
        nearest = np.abs(ends[:, None] - even).min(axis=0)
        assert np.abs(ends[bounds] - even) == pytest.approx(nearest)
        assert (np.diff(bounds) >= 0).all() and (bounds[0], bounds[-1]) == (0, len(weights))


def test_a_sample_with_another_number_of_image_tokens_is_named():
    source = DigitStrips(tile=16, tokens_per_tile=5, seq_length=SEQ_LENGTH, seed=0)
    flags = {"packing": None, "reads_labels": True, "cp": 2, "sp": 1}
    reader = Reader(source, TINY.encoders, source.token_ids, seq_length=SEQ_LENGTH, **flags)
    take = Take("train", [[7]], {IMAGES: Share([])}, StepWork(0.0, None))
    assert reader[take].startswith("sample 7 of train has 15 tokens of images for 3 inputs")
