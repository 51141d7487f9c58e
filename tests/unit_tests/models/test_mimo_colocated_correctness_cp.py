# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Weights after one step with CP 2 equal those of an equal-DP, CP-1 run with the same encoder."""

import pytest

from tests.unit_tests.models.one_step import assert_step_equals_reference
from tests.unit_tests.test_utilities import requires_world_size


class TestWeightsAfterOneStep:
    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=1,dp=8", "tp=2,cp=2,dp=2,ep=4,etp=1", id="fan-in-4-tp-2-ep-4"),
            pytest.param("tp=4,dp=2", "cp=2,dp=4,ep=2", id="fan-out-2-ep-2"),
            pytest.param("tp=2,dp=4", "cp=2,dp=4", id="equal"),
        ],
    )
    def test_shards_equal_the_reference(self, encoder, language):
        assert_step_equals_reference(encoder, language)
