# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the tools."""

import shutil

import pytest

from mini import World


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("template"))


@pytest.fixture
def world(tmp_path, template) -> World:
    shutil.copytree(template.base, tmp_path, dirs_exist_ok=True)
    return World(tmp_path)
