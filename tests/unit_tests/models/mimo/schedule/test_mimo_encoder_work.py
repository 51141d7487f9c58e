# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The encoders' work around the language model's: reductions."""

import pytest

from examples.mimo.nemotron_vlm.model.encoders.stage import EncoderStage
from tests.unit_tests.examples.nemotron_vlm.loop.rows import FLAT, OVERLAP, PIPELINE, Row
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.test_utilities import requires_world_size

TWO_ENCODERS = 4, "sound and images", "images:tp=2,dp=2 sound:dp=4"

pytestmark = requires_world_size(4)


@pytest.mark.parametrize("language", [PIPELINE, FLAT])
def test_encoders_that_some_ranks_do_not_run_reduce_after_the_backward(
    language, monkeypatch, record_property
):
    monkeypatch.setattr(EncoderStage, "runs_on_every_rank", False)
    check(Row(*TWO_ENCODERS, language, OVERLAP), record_property)
