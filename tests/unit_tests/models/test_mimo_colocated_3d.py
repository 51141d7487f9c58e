# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Context, pipeline and expert parallelism at once: ten steps equal one rank's."""

import pytest

from tests.unit_tests.examples.nemotron_vlm.runs import assert_same_trajectory_as_one_rank
from tests.unit_tests.test_utilities import requires_world_size


class TestColocated3D:
    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=1,dp=8", "cp=2,pp=2,dp=2,ep=2", id="fan-in-4-cp-2-pp-2-ep-2"),
            pytest.param("tp=8,dp=1", "cp=2,pp=2,dp=2,ep=4", id="fan-out-2-cp-2-pp-2-ep-4"),
            pytest.param("tp=8,dp=1", "cp=2,pp=4,dp=1,ep=2", id="equal-cp-2-pp-4-ep-2"),
            pytest.param(
                "tp=4,dp=2", "tp=2,pp=2,dp=2,ep=2,etp=1,vpp=2", id="tp-sp-pp-2-vpp-2-ep-2"
            ),
            pytest.param("tp=1,dp=8", "tp=2,cp=2,pp=2,dp=1,ep=4,etp=1", id="tp-sp-cp-2-pp-2-ep-4"),
        ],
    )
    def test_trajectory_equals_one_rank(self, encoder, language):
        assert_same_trajectory_as_one_rank(encoder, language)
