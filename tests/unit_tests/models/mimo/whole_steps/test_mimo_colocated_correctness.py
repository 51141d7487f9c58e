# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Weights after one step equal those of a reference of equal DP, CP=1 and PP=1, same encoder."""

import pytest

from tests.unit_tests.models.mimo.one_step import assert_step_equals_reference
from tests.unit_tests.test_utilities import requires_world_size


@requires_world_size(8)
class TestWeightsAfterOneStep:
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

    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=1,dp=8", "tp=2,cp=2,dp=2,ep=4,etp=1", id="fan-in-4-tp-2-ep-4"),
            pytest.param("tp=4,dp=2", "cp=2,dp=4,ep=2", id="fan-out-2-ep-2"),
            pytest.param("tp=2,dp=4", "cp=2,dp=4", id="equal"),
        ],
    )
    def test_with_context_parallelism(self, encoder, language):
        assert_step_equals_reference(encoder, language)

    @pytest.mark.parametrize(
        ("encoder", "language", "microbatch"),
        [
            pytest.param("tp=1,dp=8", "pp=2,dp=4", 8, id="fan-in-2-as-many-as-stages"),
            pytest.param("tp=2,dp=4", "pp=2,dp=4,ep=2", 4, id="equal-more-than-stages"),
            pytest.param("tp=4,dp=2", "pp=2,dp=4,ep=4,vpp=2", 4, id="fan-out-2-virtual-stages"),
            pytest.param("tp=1,dp=8", "cp=2,pp=2,dp=2,ep=2", 4, id="fan-in-4-cp-2-ep-2"),
        ],
    )
    def test_with_a_pipeline(self, encoder, language, microbatch):
        assert_step_equals_reference(encoder, language, microbatch=microbatch)

    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=2,dp=4", "pp=2,dp=4,ep=4,vpp=2", id="virtual-stages"),
            pytest.param("tp=1,dp=8", "cp=2,pp=2,dp=2,ep=2", id="cp-2-ep-2"),
        ],
    )
    def test_with_the_encoder_in_bubbles(self, encoder, language):
        bubbles = ("--encoder-schedule", "bubbles")
        assert_step_equals_reference(encoder, language, *bubbles, microbatch=4)

    def test_recomputing_the_encoder_changes_nothing(self):
        recompute = ("--recompute-encoder", "1")
        assert_step_equals_reference("tp=1,dp=8", "pp=2,dp=4", *recompute)
