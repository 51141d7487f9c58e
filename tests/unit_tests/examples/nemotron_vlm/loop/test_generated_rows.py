# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Drawn rows on CPU ranks: losses and gradient norms are one rank's.

``GENERATED_ROWS=SEED:COUNT`` in the environment draws others, and any number of them for a world.
"""

import functools
import os
import shlex
from collections.abc import Iterator

import pytest

from tests.unit_tests.examples.nemotron_vlm.loop.generated import rows
from tests.unit_tests.examples.nemotron_vlm.loop.rows import Row
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.examples.nemotron_vlm.runs import from_last_rank
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

SEED, _, COUNT = os.environ.get("GENERATED_ROWS", "1").partition(":")
COUNTS = {8: int(COUNT or 2), 4: int(COUNT or 4)}
"""Rows of each world."""


@functools.cache
def _drawn(ranks: int) -> Iterator[Row]:
    return rows(ranks, int(SEED))


@pytest.mark.skipif(HAVE_CUDA, reason="rows on GPUs have models of their own")
@pytest.mark.parametrize(
    "ranks, number",
    [
        pytest.param(ranks, number, marks=requires_world_size(ranks))
        for ranks, count in COUNTS.items()
        for number in range(count)
    ],
)
def test_trajectory_of_a_drawn_row_is_one_ranks(ranks, number, record_property):
    Utils.initialize_distributed()
    # One rank draws: reading command lines takes a while.
    row = from_last_rank(next(_drawn(ranks)) if Utils.rank == ranks - 1 else None)
    print(f"torchrun --nproc-per-node {ranks} PROGRAM {shlex.join(row.commands[0])}")
    check(row, record_property)
