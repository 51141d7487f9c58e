# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Packed samples of odd lengths train as if each had come alone, whatever the layout."""

import contextlib
import functools

import pytest

from tests.unit_tests.examples.nemotron_vlm.runs import LOCAL, trainer
from tests.unit_tests.models.mimo.one_step import PROPORTIONAL_STEP
from tests.unit_tests.models.mimo.one_step import TOLERANCE as UNPACKED
from tests.unit_tests.models.mimo.packed_rows import (
    LENGTHS_AND_TILES,
    SAMPLES_A_ROW,
    OddSamples,
    PackedSlices,
)
from tests.unit_tests.models.mimo.weights import (
    Weights,
    assert_shards_equal,
    assert_shards_moved_alike,
    gather_weights,
)
from tests.unit_tests.test_utilities import requires_world_size

TOLERANCE = 2 * UNPACKED
"""Samples are short, and gradients of a recurrence's decay cancel: 2.4e-5 found."""


@contextlib.contextmanager
def packed_trainer(encoder: str, language: str, samples_a_row: int = SAMPLES_A_ROW, rows: int = 8):
    arguments = (
        *("--encoder", encoder, "--language", language, *LOCAL, *PROPORTIONAL_STEP),
        *("--global-batch-size", str(rows * SAMPLES_A_ROW)),
        *("--micro-batch-size", str(samples_a_row)),
    )
    with trainer(*arguments, source=OddSamples()) as run:
        run.loading = PackedSlices(run.loading, run.session.modules)
        yield run


def without_balancing_loss(run):
    """Remove the loss: it treats a row as one sequence, so it depends on packing."""
    run.stages[0].config.moe_aux_loss_coeff = 0.0
    return run


@functools.cache
def whole_rows(samples_a_row: int = SAMPLES_A_ROW, rows: int = 8) -> tuple[Weights, Weights, float]:
    """Weights before and after a step, and its loss, where each rank takes one whole row."""
    with packed_trainer("dp=8", "dp=8", samples_a_row, rows) as run:
        before = gather_weights(run.stages)
        loss = run.train_step()["loss"]
        return before, gather_weights(run.stages), loss


class TestPackedSamples:
    @requires_world_size(1)
    def test_a_packed_row_trains_as_its_samples_one_by_one(self):
        rows = len(LENGTHS_AND_TILES) // SAMPLES_A_ROW
        with packed_trainer("", "", samples_a_row=1, rows=rows) as run:
            before = gather_weights(run.stages)
            alone = without_balancing_loss(run).train_step()
            after = gather_weights(run.stages)
        with packed_trainer("", "", rows=rows) as run:
            packed = without_balancing_loss(run).train_step()
            assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
        assert packed["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert packed["num_tokens"] == alone["num_tokens"]

    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=1,dp=8", "cp=4,dp=2,ep=2", id="fan-in-4-cp-4-ep-2"),
            pytest.param("tp=1,dp=8", "tp=2,cp=2,dp=2,ep=2,etp=2", id="fan-in-4-tp-2-cp-2-ep-2"),
            pytest.param("tp=8,dp=1", "cp=2,dp=4,ep=4", id="fan-out-4-cp-2-ep-4"),
            pytest.param("tp=4,dp=2", "cp=4,dp=2", id="equal-cp-4"),
        ],
    )
    def test_cut_rows_train_as_whole_ones(self, encoder, language):
        before, after, loss = whole_rows()
        with packed_trainer(encoder, language) as run:
            assert_shards_equal(run.stages, before)
            assert run.train_step()["loss"] == pytest.approx(loss, rel=1e-6)
            assert_shards_moved_alike(run.stages, before, after, TOLERANCE)

    @requires_world_size(8)
    @pytest.mark.parametrize("etp", [2, 1])
    def test_padded_rows_of_one_sample_train_as_whole_ones(self, etp):
        """No length of the eight is a multiple of 2·cp·tp = 8."""
        before, after, loss = whole_rows(samples_a_row=1, rows=2)
        language = f"tp=2,cp=2,dp=2,ep=2,etp={etp}"
        with packed_trainer("tp=4,dp=2", language, samples_a_row=1, rows=2) as run:
            assert_shards_equal(run.stages, before)
            assert run.train_step()["loss"] == pytest.approx(loss, rel=1e-6)
            assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
