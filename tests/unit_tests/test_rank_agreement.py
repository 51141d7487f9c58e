# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The guards of tests, and what ranks of a run share."""

import pytest
import torch

from megatron.core import parallel_state
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils


def test_a_read_of_a_global_group_is_refused():
    with pytest.raises(AssertionError, match="reads a global group"):
        parallel_state.get_tensor_model_parallel_group()


def test_waiting_for_a_value_is_refused():
    value = torch.ones(1, device=Utils.device)
    with no_host_sync():
        doubled = value * 2
        with pytest.raises((AssertionError, RuntimeError)):
            doubled.item()
    assert doubled.item() == 2
