# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Training on energon's data, which goes on in another layout: the trajectory of one rank."""

from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import shared_digits
from tests.unit_tests.examples.nemotron_vlm.loop.rows import PIPELINE, WORKERS, Row
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.test_utilities import requires_world_size

ROW = Row(
    *(4, "packed shards of all media", "images:tp=2,dp=2 sound:dp=4", PIPELINE),
    then=(("images:dp=4 sound:dp=4", "tp=2,dp=2,ep=2,etp=1", WORKERS),),
)


@requires_world_size(4)
def test_packed_trajectory_is_one_ranks(shared_path, record_property):
    with shared_digits(samples=96) as data:
        check(ROW, record_property, shards=data, saved=shared_path)
