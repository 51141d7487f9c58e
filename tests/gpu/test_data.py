# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Packed shards read by four processes: stopped, and resumed with another dp."""

import pytest

from tests.gpu.rows import LOCAL, PACK
from tests.unit_tests.examples.nemotron_vlm.energon.shared_digits import shared_digits
from tests.unit_tests.examples.nemotron_vlm.runs import (
    STEPS,
    TOLERANCE,
    apart,
    one_rank_trajectory,
    trainer,
)
from tests.unit_tests.test_utilities import requires_world_size

ROWS = 8
"""Number of rows in a step."""


@pytest.fixture(scope="module")
def data():
    """Digits in shards."""
    with shared_digits(samples=240) as made:
        yield made


@requires_world_size(2)
def test_shards_go_on_with_another_dp(data, shared_path, record_property):
    common = (*LOCAL, *PACK, "--global-batch-size", str(ROWS), "--micro-batch-size", "1")
    common += ("--data", f"energon:{data}", "--tokenizer-model", str(data / "tokenizer"))
    workers = ("--num-workers", "4")
    half = STEPS // 2
    with trainer("--encoder", "dp=2", "--language", "cp=2", *common, *workers) as run:
        records = [run.train_step() for _ in range(half)]
        run.save(shared_path)
    load = ("--load", str(shared_path))
    with trainer("--encoder", "tp=2", "--language", "dp=2", *common, *workers, *load) as run:
        records += [run.train_step() for _ in range(STEPS - half)]
    found = apart(records, one_rank_trajectory(*common))
    record_property("found", found)
    assert max(found.values()) <= TOLERANCE, found
