# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Packed samples of odd lengths train as if each had come alone, whatever the layout."""

import contextlib
import functools

import pytest

from tests.unit_tests.examples.nemotron_vlm.loop.rows import WEIGHTS
from tests.unit_tests.examples.nemotron_vlm.runs import LOCAL, trainer
from tests.unit_tests.models.mimo.one_step import PROPORTIONAL_STEP, check_weights
from tests.unit_tests.models.mimo.one_step import TOLERANCE as UNPACKED
from tests.unit_tests.models.mimo.packed_rows import (
    LENGTHS_AND_TILES,
    SAMPLES_A_ROW,
    OddSamples,
    PackedSlices,
)
from tests.unit_tests.models.mimo.weights import assert_shards_moved_alike, gather_weights
from tests.unit_tests.test_utilities import requires_world_size

TOLERANCE = 2 * UNPACKED
"""Samples are short, and gradients of a recurrence's decay cancel: 2.4e-5 found."""


@contextlib.contextmanager
def packed(encoder: str, language: str, samples_a_row: int = SAMPLES_A_ROW, rows: int = 8):
    arguments = (
        *("--encoder", encoder, "--language", language, *LOCAL, *PROPORTIONAL_STEP),
        *("--global-batch-size", str(rows * SAMPLES_A_ROW)),
        *("--micro-batch-size", str(samples_a_row)),
    )
    with trainer(*arguments, source=OddSamples()) as run:
        run.loading = PackedSlices(run.loading, run.session.modules)
        yield run


RUNS = {
    "four samples a row": packed,
    "one sample a row": functools.partial(packed, samples_a_row=1, rows=2),
}
"""By the model of a row. With one, no length of the eight is a multiple of 2·cp·tp = 8."""


def without_balancing_loss(run):
    """Remove the loss: it treats a row as one sequence, so it depends on packing."""
    run.stages[0].config.moe_aux_loss_coeff = 0.0
    return run


@requires_world_size(1)
def test_a_packed_row_trains_as_its_samples_one_by_one():
    rows = len(LENGTHS_AND_TILES) // SAMPLES_A_ROW
    with packed("", "", samples_a_row=1, rows=rows) as run:
        before = gather_weights(run.stages)
        alone = without_balancing_loss(run).train_step()
        after = gather_weights(run.stages)
    with packed("", "", rows=rows) as run:
        together = without_balancing_loss(run).train_step()
        assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert together["num_tokens"] == alone["num_tokens"]


@requires_world_size(8)
@pytest.mark.parametrize("row", WEIGHTS["packed samples of odd lengths"], ids=str)
def test_cut_rows_train_as_whole_ones(row):
    check_weights(row, RUNS[row.model], ("dp=8", "dp=8"), TOLERANCE)
