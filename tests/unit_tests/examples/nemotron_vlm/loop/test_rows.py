# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rows on CPU ranks: losses and gradient norms are one rank's, or weights after a step are.

``GENERATED_ROWS=SEED:COUNT`` in the environment draws other rows, and any number of them for a
world; ``GENERATED_ROWS=SEED:COUNT:adapted`` draws rows with adapters.
"""

import functools
import itertools
import os
import shlex
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from examples.mimo.nemotron_vlm.model.encoders.stage import EncoderStage
from megatron.core.distributed import param_and_grad_buffer
from tests.unit_tests.examples.nemotron_vlm.loop.generated import FACTORS, rows, values_of_rows
from tests.unit_tests.examples.nemotron_vlm.loop.models import MODELS
from tests.unit_tests.examples.nemotron_vlm.loop.rows import (
    FLAT,
    ON_CPUS,
    OVERLAP,
    PIPELINE,
    WEIGHTS,
    Row,
)
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.examples.nemotron_vlm.runs import OWN_DEFAULTS, from_last_rank
from tests.unit_tests.models.mimo.one_step import check_weights
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

SEED = 2
DRAWN = {(8, ""): (SEED, 6), (4, ""): (SEED, 8), (4, "adapted"): (4, 1)}
"""Seed and number of drawn rows, by world and kind."""

if "GENERATED_ROWS" in os.environ:
    chosen, count, kind, *_ = f"{os.environ['GENERATED_ROWS']}::".split(":")
    DRAWN = {(ranks, kind): (int(chosen), int(count)) for ranks in (8, 4)}


def parameters(groups: dict[str, list[Row]]) -> list:
    """The rows as parameters of a test, with their numbers of ranks and groups as marks.

    GPUs have rows of their own at a lower rate than the program's own, at which rounding on GPUs
    grows beyond the tolerance within ten steps.
    """
    return [
        pytest.param(
            row, id=str(row), marks=[requires_world_size(row.ranks), pytest.mark.shows(group)]
        )
        for group, rows in groups.items()
        for row in rows
        if not (HAVE_CUDA and set(OWN_DEFAULTS) <= {*MODELS[row.model].options, *row.common})
    ]


@pytest.fixture
def deterministic():
    """Undo what ``--deterministic-mode`` and reduction in rank order set for the whole process."""
    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
    with mock.patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(False)
    param_and_grad_buffer.dist_reduce_scatter_func = reduce_scatter


@pytest.mark.parametrize("row", parameters(ON_CPUS))
def test_trajectory_is_one_ranks(row, deterministic, shared_path, record_property):
    check(row, record_property, saved=shared_path)


@functools.cache
def _drawn(ranks: int, kind: str) -> Iterator[Row]:
    return rows(ranks, DRAWN[ranks, kind][0], kind)


@pytest.mark.skipif(HAVE_CUDA, reason="rows on GPUs have models of their own")
@pytest.mark.parametrize(
    "ranks, kind, number",
    [
        pytest.param(ranks, kind, number, marks=requires_world_size(ranks))
        for (ranks, kind), (_, count) in DRAWN.items()
        for number in range(count)
    ],
)
def test_trajectory_of_a_drawn_row_is_one_ranks(ranks, kind, number, record_property):
    Utils.initialize_distributed()
    # One rank draws: reading command lines takes a while.
    row = from_last_rank(next(_drawn(ranks, kind)) if Utils.rank == ranks - 1 else None)
    print(f"torchrun --nproc-per-node {ranks} PROGRAM {shlex.join(row.commands[0])}")
    check(row, record_property)


@requires_world_size(1)
def test_the_program_takes_each_value_of_each_factor():
    wanted = {(name, value) for name, values in FACTORS.items() for value in values}
    for values in itertools.islice(values_of_rows(8, SEED), 40):
        wanted -= set(values.items())
        if not wanted:
            break
    assert not wanted


@requires_world_size(4)
@pytest.mark.parametrize("language", [PIPELINE, FLAT])
def test_encoders_that_some_ranks_do_not_run_reduce_after_the_backward(
    language, monkeypatch, record_property
):
    monkeypatch.setattr(EncoderStage, "runs_on_every_rank", False)
    encoders = "images:tp=2,dp=2 sound:dp=4"
    check(Row(4, "sound and images", encoders, language, OVERLAP), record_property)


@pytest.mark.parametrize("row", parameters(WEIGHTS))
def test_weights_after_a_step_are_the_references(row):
    check_weights(row)
