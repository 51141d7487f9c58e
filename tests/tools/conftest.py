# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the tools."""

import pytest

from mini import World


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)
