# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The GPU cases can be imported where there is no GPU: a moved name must not wait for one."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.unit_tests.test_utilities import requires_world_size

CASES = sorted(Path(__file__).parents[1].joinpath("gpu").glob("*.py"))
SCRIPTS = ("conftest", "upstream_script")


@requires_world_size(1)
@pytest.mark.parametrize("name", [path.stem for path in CASES if path.stem not in SCRIPTS])
def test_cases_can_be_imported(name):
    assert import_module(f"tests.gpu.{name}")
