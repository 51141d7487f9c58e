# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Weights after one step equal those of an equal-DP run with the same encoder layout; CP 1."""

import pytest

from tests.unit_tests.models.one_step import assert_step_equals_reference
from tests.unit_tests.test_utilities import requires_world_size


class TestWeightsAfterOneStep:
    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=1,dp=8", "tp=4,dp=2,ep=2,etp=1", id="fan-in-4-ep-2"),
            pytest.param("tp=4,dp=2", "tp=1,dp=8,ep=4", id="fan-out-4-ep-4"),
            pytest.param("tp=2,dp=4", "tp=2,dp=4,ep=8,etp=1", id="equal-ep-8"),
        ],
    )
    def test_shards_equal_the_reference(self, encoder, language):
        assert_step_equals_reference(encoder, language)
