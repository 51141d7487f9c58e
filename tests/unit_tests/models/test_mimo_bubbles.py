# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Encoder work in the pipeline's bubbles changes nothing of what is trained."""

import pytest

from tests.unit_tests.models.mimo_gpt import IMAGES
from tests.unit_tests.models.mimo_gpt_samples import draw
from tests.unit_tests.models.mimo_gpt_training import Job
from tests.unit_tests.models.test_mimo_colocated_e2e import check
from tests.unit_tests.test_utilities import requires_world_size

UNEVEN = Job(
    [draw({IMAGES: seed * 5 % 7}, seed, length=12) for seed in range(16)],
    microbatches=4,
    in_bubbles=True,
)


@requires_world_size(4)
class TestFourRanks:
    @pytest.mark.parametrize(
        "language",
        [dict(pp=4), dict(pp=2, dp=2), dict(cp=2, pp=2), dict(pp=2, dp=2, vpp=2)],
        ids=str,
    )
    def test_the_loss_falls_as_on_one_rank(self, language):
        check(UNEVEN, language | {"variable_lengths": False}, True, images=dict(dp=4))
