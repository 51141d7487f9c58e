# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program with production layers over NCCL has one GPU's losses in every layout."""

import pytest

from tests.gpu.comparison import compare, on_one_gpu, tolerance
from tests.gpu.rows import MODELS, ON_ONE, ON_TWO
from tests.unit_tests.test_utilities import requires_world_size


def check(row, record_property):
    """Run a row, and assert that it is within its tolerance."""
    result = compare(row)
    for name, value in result.items():
        record_property(name, value)
    for name, allowed in result["allowed"].items():
        assert result["found"][name] <= allowed, f"{name}: {result}"
    assert (result["skipped"] > 0) == (row.model == "fp16")


@requires_world_size(1)
@pytest.mark.parametrize("model", MODELS)
def test_one_gpu_is_recorded(model, record_property):
    """The other runs are compared with this one; 16-bit runs with three, whose spread is noted."""
    on_one_gpu(MODELS[model])
    record_property("allowed", tolerance(MODELS[model]))


@requires_world_size(1)
@pytest.mark.parametrize("row", ON_ONE, ids=str)
def test_one_gpu(row, record_property):
    check(row, record_property)


@requires_world_size(2)
@pytest.mark.parametrize("row", ON_TWO, ids=str)
def test_two_gpus(row, record_property):
    check(row, record_property)
