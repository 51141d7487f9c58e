# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the tools."""

import shutil
from pathlib import Path

import pytest

from mini import NEXT, REPOSITORY, World
from overlay.fetch import fetch
from overlay.patchset import Lock


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("template"))


@pytest.fixture
def world(tmp_path, template) -> World:
    shutil.copytree(template.base, tmp_path, dirs_exist_ok=True)
    return World(tmp_path)


@pytest.fixture(scope="session")
def upstreams(tmp_path_factory) -> Path:
    """A pristine tree of the real pin, or with NEXT of the next version; no test changes it."""
    path = tmp_path_factory.mktemp("upstreams") / "checkout"
    lock = Lock.read(REPOSITORY / "patches/upstream.toml")
    fetch(lock, REPOSITORY, path, directory=NEXT and Path(NEXT))
    return path
