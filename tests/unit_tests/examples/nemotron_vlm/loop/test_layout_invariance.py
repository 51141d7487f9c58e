# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The same run in every layout: losses and gradient norms of ten steps equal one rank's.

The learning rate and epsilon are the program's own, for which the README says how far runs may
differ.
"""

import pytest

from tests.unit_tests.examples.nemotron_vlm.runs import (
    OWN_DEFAULTS,
    STEPS,
    assert_same_trajectory_as_one_rank,
)
from tests.unit_tests.test_utilities import requires_world_size


@requires_world_size(8)
class TestEightRanks:
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=1,dp=4", "pp=2,cp=2,dp=1,ep=2", id="pp-2-cp-2-ep-2"),
            pytest.param("pp=2,dp=2", "tp=2,dp=2,ep=4,etp=1", id="encoder-pp-2"),
        ],
    )
    def test_non_colocated_trajectory_equals_one_rank(self, encoder, language):
        options = ("--placement", "non-colocated")
        assert_same_trajectory_as_one_rank(
            encoder, language, *options, common=OWN_DEFAULTS, steps=STEPS
        )

    def test_colocated_trajectory_equals_one_rank(self):
        layouts = "tp=2,dp=4", "cp=2,pp=2,dp=2,ep=2"
        assert_same_trajectory_as_one_rank(*layouts, common=OWN_DEFAULTS, steps=STEPS)


class TestFourRanks:
    @requires_world_size(4)
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=2,dp=2", "tp=4,dp=1", id="fan-in-2-tp-4"),
            pytest.param("tp=4,dp=1", "tp=1,dp=4", id="fan-out-4"),
        ],
    )
    def test_colocated_trajectory_equals_one_rank(self, encoder, language):
        assert_same_trajectory_as_one_rank(encoder, language, common=OWN_DEFAULTS, steps=STEPS)

    @requires_world_size(4)
    @pytest.mark.parametrize(
        ("encoder", "language", "samples"),
        [
            pytest.param("tp=1,dp=1", "dp=3,ep=1", 24, id="1-and-3"),
            pytest.param("tp=2,dp=1", "dp=2,ep=2", 32, id="2-and-2"),
        ],
    )
    def test_non_colocated_trajectory_equals_one_rank(self, encoder, language, samples):
        options = ("--placement", "non-colocated")
        assert_same_trajectory_as_one_rank(
            encoder, language, *options, common=OWN_DEFAULTS, samples=samples
        )


class TestTwoRanks:
    @requires_world_size(2)
    @pytest.mark.parametrize("encoder", ["tp=1", "tp=2"])
    def test_colocated_trajectory_equals_one_rank(self, encoder):
        assert_same_trajectory_as_one_rank(encoder, "tp=1,dp=2", common=OWN_DEFAULTS, steps=STEPS)
