# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's own scale of the loss of multi-token prediction, which depends on the layout."""

import pytest
import torch

from tests.unit_tests.test_utilities import Utils, requires_world_size
from tests.unit_tests.transformer.test_mtp_of_grid import WITH_LOSS, of_two_ranks, of_upstream

LOCAL_COUNTS = "upstream scales each rank's loss by that rank's own numbers of tokens"


@requires_world_size(2)
@pytest.mark.parametrize(
    "with_loss",
    [
        WITH_LOSS[:1] * 2,
        pytest.param(WITH_LOSS, marks=pytest.mark.xfail(strict=True, reason=LOCAL_COUNTS)),
    ],
    ids=["alike", "apart"],
)
def test_samples_on_two_ranks_weigh_as_on_one(with_loss):
    """They do if equally many tokens of each have a loss, and must whatever their number."""
    Utils.initialize_distributed()
    torch.testing.assert_close(*of_two_ranks(of_upstream, with_loss))
