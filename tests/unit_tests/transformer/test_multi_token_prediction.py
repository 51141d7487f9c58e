# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's own scale of the loss of multi-token prediction, which depends on the layout."""

import pytest
import torch

from tests.unit_tests.test_utilities import Utils, requires_world_size
from tests.unit_tests.transformer.test_mtp_of_grid import WITH_LOSS, of_two_ranks, of_upstream

LOCAL_COUNTS = "upstream scales each rank's loss by that rank's own numbers of tokens"


@requires_world_size(2)
@pytest.mark.xfail(strict=True, reason=LOCAL_COUNTS)
def test_samples_on_two_ranks_weigh_as_on_one():
    """They must, also where different numbers of their tokens have a loss."""
    Utils.initialize_distributed()
    torch.testing.assert_close(*of_two_ranks(of_upstream, WITH_LOSS))
