# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Graphs and the encoder in the bubbles, as the program starts them: in a world of their own."""

import pytest

from tests.gpu.rows import AHEAD
from tests.gpu.test_layouts import check
from tests.unit_tests.test_utilities import requires_world_size


@requires_world_size(2)
@pytest.mark.parametrize("row", AHEAD, ids=str)
def test_two_gpus_run_ahead(row, record_property):
    check(row, record_property)
