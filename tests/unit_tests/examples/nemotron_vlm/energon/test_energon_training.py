# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Training on energon's data: one trajectory in every layout, each sample once an epoch."""

from collections import Counter

import pytest

from examples.mimo.common.layout import Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from tests.unit_tests.examples.nemotron_vlm.data.images_alone import step_plan
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import shared_digits, source
from tests.unit_tests.examples.nemotron_vlm.loop.rows import ON_SHARDS
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.test_utilities import requires_world_size

SAMPLES = 96


@pytest.fixture(scope="module")
def data():
    """Digits in shards."""
    with shared_digits(samples=SAMPLES) as made:
        yield made


@requires_world_size(4)
@pytest.mark.parametrize("row", ON_SHARDS, ids=str)
def test_packed_trajectory_is_one_ranks(row, data, shared_path, record_property):
    check(row, record_property, shards=data, saved=shared_path)


class TestEpoch:
    @requires_world_size(1)
    @pytest.mark.parametrize("packing", [None, Packing(window=28, multiple=8)])
    def test_a_run_that_goes_on_with_another_dp_sees_each_sample_once(self, data, packing):
        opened = source(data)
        rows = Rows(opened, "train", 64, packing, seed=5)
        epoch = opened.epoch_size("train")
        assert epoch % 28 == 0
        whole = epoch if packing is None else _rows_of(rows, epoch)
        before = whole // 2 // 2 * 2
        parts = [(2, 0, before), (1, before, whole - before)]
        read = Counter()
        for dp, first, count in parts:
            layouts = Layouts((Layout(dp=dp),), Layout(dp=dp), Batch(count, 1, 64))
            for rank in range(dp):
                # Opened anew, as in another process.
                stream = Rows(source(data), "train", 64, packing, seed=5)
                plan = step_plan(layouts, rank, rank, balance=True)
                for take in plan.takes(stream, first, count // dp, 1):
                    read.update(opened.name("train", n) for row in take.rows for n in row)
        assert len(read) == epoch and set(read.values()) == {1}


def _rows_of(rows: Rows, samples: int) -> int:
    """Rows that hold the first samples."""
    seen, count = 0, 0
    while seen < samples:
        seen += len(rows.samples(count, 1)[0])
        count += 1
    return count
