# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Merging onto a tree that differs from the lock, and the move of the pin that follows."""

import shutil
import tomllib

import pytest

from mini import (
    LATER,
    LATER_UPSTREAM,
    PIN,
    SECOND,
    SECOND_UPSTREAM,
    UPSTREAM,
    World,
    numbered,
    snapshot,
    write_tree,
)

A, B, REPLACED = "megatron/core/a.py", "megatron/core/sub/b.py", "megatron/core/replaced.py"
MODULE = "megatron/core/new/deep/module.py"
OURS = UPSTREAM | {A: numbered("a", {12: "mine"})}
RESOLVED = "a_0\n" + numbered("a", {3: "A_three", 10: "a_ten\nA_ten_and_a_half"})


@pytest.fixture
def later(world) -> World:
    """The checkout is the later version, as a git tree; the lock knows its sdist."""
    world.add_version(LATER, LATER_UPSTREAM)
    world.drop_version(SECOND)
    world.as_git(LATER_UPSTREAM)
    return world


def test_commits_of_the_user_are_merged(world):
    world.as_git(OURS)
    original = snapshot(world.checkout)
    assert world.apply().code == 4
    assert world.apply("--three-way").out == ["applied: 5 files changed"]
    changes = {3: "A_three", 10: "a_10\nA_ten_and_a_half", 12: "mine"}
    assert world.text(A) == numbered("a", changes)
    assert world.text(REPLACED) == "ours_instead\n"
    assert world.apply("--status").code == 0
    wrong = world.run("refresh", world.checkout).errors
    assert f"{A}: its original is not that of {PIN}" in wrong[0]
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


def test_a_tree_as_locked_is_applied_as_ever(world):
    world.as_git(UPSTREAM)
    assert world.apply("--three-way").code == 0
    assert world.apply("--status").out == ["applied: 5 files"]
    assert world.apply().out == ["already applied"]


@pytest.mark.parametrize(
    "files, note",
    [
        ({B: None}, f"gone: {B}, which 0001 changed"),
        ({REPLACED: "theirs, later\n"}, f"review: {REPLACED} is ours, and not what upstream has"),
        ({MODULE: "theirs\n"}, f"review: {MODULE}"),
        ({A: LATER_UPSTREAM[A]}, f"conflict: {A} with 0001, 0002"),
    ],
)
def test_what_a_merge_cannot_settle_is_listed(world, files, note):
    changed = {path: text for path, text in (UPSTREAM | files).items() if text is not None}
    world.as_git(changed)
    original = snapshot(world.checkout)
    result = world.apply("--three-way")
    assert (result.code, len(result.out)) == (1, 2)
    assert result.out[1].startswith(note)
    markers = [line[:7] for line in world.text(A).splitlines() if line[:3] in ("<<<", "===", ">>>")]
    assert markers == (["<" * 7, "=" * 7, ">" * 7] if A in files else [])
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


@pytest.mark.parametrize("path", [A, REPLACED, "examples/mimo/run.py", None])
def test_what_is_not_committed_is_refused(world, path):
    if path:
        world.as_git(OURS)
        write_tree(world.checkout, {path: "uncommitted\n"})
    before = snapshot(world.checkout)
    result = world.apply("--three-way")
    assert (result.code, bool(result.errors)) == (5, True)
    assert (path or A) in result.errors[0]
    assert snapshot(world.checkout) == before


def test_the_pin_moves_to_the_merged_and_resolved_tree(later):
    assert later.apply("--three-way").out[1:] == [f"conflict: {A} with 0001, 0002"]
    assert later.text(B) == LATER_UPSTREAM[B]  # has our change already
    assert later.apply("--status").out == [f"applied: merged from the patches for {PIN}"]
    assert later.apply("--three-way").code == 1  # still to be resolved
    unresolved = later.run("refresh", later.checkout)
    assert "conflict markers left" in unresolved.errors[0]
    (later.checkout / A).write_text(RESOLVED)
    before = later.files()
    assert later.apply("--three-way").code == later.apply("--revert").code == 5
    assert later.files() == before
    result = later.run("refresh", later.checkout)
    assert result.code == 0, result.errors
    assert f"{PIN} left the lock: {LATER} is the pin" in result.out

    lock = tomllib.loads((later.root / "patches/upstream.toml").read_text())
    assert (lock["pin"], list(lock["versions"])) == (LATER, [LATER])
    assert "+A_three" in later.patch_text("0001-first")
    assert B not in later.patch_text("0001-first")
    assert "+A_ten_and_a_half" in later.patch_text("0002-second")
    assert later.apply("--status").out == ["applied: 4 files"]
    before = snapshot(later.root)
    assert later.run("refresh", later.checkout).out[-1] == "patches and lock are up to date"
    assert snapshot(later.root) == before

    shutil.rmtree(later.checkout)
    write_tree(later.checkout, LATER_UPSTREAM)
    assert later.apply().code == 0
    assert later.text(A) == RESOLVED


def test_refresh_says_which_other_version_the_moved_patches_do_not_fit(later):
    later.add_version(SECOND, SECOND_UPSTREAM)
    later.apply("--three-way")
    (later.checkout / A).write_text(RESOLVED)
    before = snapshot(later.root)
    result = later.run("refresh", later.checkout)
    assert (result.code, len(result.errors)) == (1, 1)
    assert f"on {SECOND}: patches/0002-second.patch: does not apply" in result.errors[0]
    assert snapshot(later.root) == before
