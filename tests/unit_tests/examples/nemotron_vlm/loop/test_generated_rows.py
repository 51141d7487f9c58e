# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Drawn rows on CPU ranks: losses and gradient norms are one rank's.

``GENERATED_ROWS=SEED:COUNT`` in the environment draws others, and any number of them for a world;
``GENERATED_ROWS=SEED:COUNT:adapted`` draws rows with adapters.
"""

import functools
import itertools
import os
import shlex
from collections.abc import Iterator

import pytest

from tests.unit_tests.examples.nemotron_vlm.loop.generated import FACTORS, rows, values_of_rows
from tests.unit_tests.examples.nemotron_vlm.loop.rows import Row
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.examples.nemotron_vlm.runs import from_last_rank
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

SEED = 2
DRAWN = {(8, ""): (SEED, 5), (4, ""): (SEED, 5), (4, "adapted"): (4, 1)}
"""Seed and number of rows, by world and kind."""

if "GENERATED_ROWS" in os.environ:
    chosen, count, kind, *_ = f"{os.environ['GENERATED_ROWS']}::".split(":")
    DRAWN = {(ranks, kind): (int(chosen), int(count)) for ranks in (8, 4)}


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
