# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's own scripts on a pristine and on an applied tree."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.upstream_world import UpstreamWorld, put_applied, put_pristine


@pytest.fixture(scope="session")
def pristine_tree(tmp_path_factory) -> Path:
    tree = tmp_path_factory.mktemp("pristine") / "checkout"
    if not put_pristine(tree):
        pytest.skip("no git checkout of Megatron-LM at hand: set MEGATRON_GIT_CHECKOUT to one")
    return tree


def world(tree: Path) -> Iterator[UpstreamWorld]:
    started = UpstreamWorld(tree)
    yield started
    started.close()


@pytest.fixture(scope="session")
def pristine(pristine_tree) -> Iterator[UpstreamWorld]:
    yield from world(pristine_tree)


@pytest.fixture(scope="session")
def applied(pristine_tree, tmp_path_factory) -> Iterator[UpstreamWorld]:
    tree = tmp_path_factory.mktemp("applied") / "checkout"
    put_applied(pristine_tree, tree)
    yield from world(tree)
