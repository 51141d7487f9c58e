# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetching puts a version in place, or nothing."""

import pytest

import mini
from mini import LATER, PIN, UPSTREAM, git, snapshot


@pytest.mark.parametrize("version", [PIN, LATER])
def test_the_cached_archive_becomes_the_checkout_without_a_network(world, version):
    target = world.base / "fetched"
    assert world.run("fetch", target, "--version", version).code == 0
    assert (target / "README.md").read_text() == UPSTREAM["README.md"]
    assert (target / "megatron/core/package_info.py").read_text() == mini.package_info(version)
    before = snapshot(world.base)
    again = world.run("fetch", target, "--version", version)
    assert (again.code, again.out) == (0, [f"{target}: already Megatron-LM {version}"])
    assert snapshot(world.base) == before


def test_a_commit_of_main_comes_from_a_git_directory(world):
    mini.make_repository(world.base / "remote", mini.LATER_UPSTREAM)
    commit = git(world.base / "remote", "rev-parse", "HEAD")
    world.edit_lock(lambda text: text.replace("1" * 40, commit))
    for _ in range(2):  # a tree that is there already still puts its archive into the cache
        assert world.run("fetch", world.base / "new", "--next", world.base / "remote").code == 0
        (world.root / f"build/cache/main-{commit}.tar").unlink()
    texts = {path: (world.base / "new" / path).read_text() for path in mini.LATER_UPSTREAM}
    assert texts == mini.LATER_UPSTREAM
