# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Images of any size: the samples of the program's sources, and each rank's share of the work."""

import numpy as np
import pytest

from examples.mimo.common.layout import Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.data import SampleSource, make_source
from examples.mimo.nemotron_vlm.data.patch_grids import grids_of, tubelets_of
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.data.sample import IMAGE, IMAGES
from examples.mimo.nemotron_vlm.data.step_plan import StepPlan
from examples.mimo.nemotron_vlm.model.presets import nano_vl_30b_a3b
from examples.mimo.nemotron_vlm.options.arguments import parse

NANO = nano_vl_30b_a3b().with_images_of_any_size()


class Photographs(SampleSource):
    """One or two images a sample, from small ones to the largest."""

    def sizes(self, split, first, count, encoder):
        drawn = (np.random.default_rng([n, 1]) for n in range(first, first + count))
        shapes = (np.exp(draw.uniform(5, 7.6, size=(draw.integers(1, 3), 2))) for draw in drawn)
        return [np.array([NANO.images.grids.size_of(h, w) for h, w in each]) for each in shapes]

    def costs(self, split, first, count):
        sizes = self.sizes(split, first, count, IMAGES)
        return np.array([(NANO.images.rows(each).sum() + 50, len(each)) for each in sizes])


def test_ranks_have_equal_work_where_equal_numbers_of_images_have_not():
    rows, parts, dp = Rows(Photographs(), "train", 8192, Packing(256, 8)), 8, 4
    layouts = Layouts((Layout(dp=parts),), Layout(dp=dp, pp=2), Batch(64, 1, 8192))
    width, work = NANO.language.hidden_size, {}
    for part in range(parts):
        places = {IMAGES: part}, part * dp // parts
        plan = StepPlan(layouts, NANO.encoders, *places, width, balance=True)
        ranges = [r for t in plan.takes(rows, 0, 16, 1) for r in t.shares[IMAGES].ranges]
        sizes = [
            rows.source.sizes("train", one.sample, 1, IMAGES)[0][one.first : one.end]
            for one in ranges
        ]
        work[part] = NANO.images.operations(np.concatenate(sizes), width)
    even = np.array_split(np.concatenate(list(work.values())), parts)
    ours, counted = ([each.sum() for each in shares] for shares in (work.values(), even))
    assert max(ours) / np.mean(ours) < 1.05
    assert max(counted) / np.mean(counted) > 1.3


@pytest.mark.parametrize(
    ("data", "model"),
    [("digits", "tiny"), ("digits:2", "tiny"), ("mock", "tiny"), ("digits:2", "tiny-omni")],
)
def test_samples_have_as_many_image_tokens_as_their_images_rows(data, model):
    options = parse(["--data", data, "--model", model, "--dynamic-resolution"], 1)
    images = options.preset.images
    source = make_source(options.args, options.preset)
    found, counts = [], set()
    for number in range(40):
        (sizes,) = source.sizes("train", number, 1, IMAGES)
        text, inputs = source.text("train", number), source.inputs("train", number, IMAGES)
        assert [image.shape[-3:-1] for image in inputs] == [tuple(g) for g in grids_of(sizes)]
        tubelets = [len(each) if each.ndim == 4 else 0 for each in inputs]
        assert tubelets == tubelets_of(sizes).tolist()
        assert (text.input_ids == IMAGE).sum() == images.rows(sizes).sum()
        cost = source.costs("train", number, 1)[0]
        assert cost[0] == len(text.input_ids) <= options.args.seq_length
        found += sizes.tolist()
        counts.add(len(sizes))
    assert len(set(found)) > 8 and len(counts) > 1
    assert set(tubelets_of(np.array(found))) == ({0, 1, 2} if images.clips else {0})
