# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The next version: a commit of upstream's main, with patches of its own."""

import shutil

import pytest

from mini import (
    HEADER,
    LATER,
    LATER_UPSTREAM,
    World,
    edit,
    git,
    make_repository,
    snapshot,
)

A, B = "megatron/core/a.py", "megatron/core/sub/b.py"
OWN = "0001-first.patch"


@pytest.fixture
def following(world) -> World:
    """A world whose lock has a later commit; of the first patch, only a.py is left there."""
    remote = world.base / "remote"
    make_repository(remote, LATER_UPSTREAM)
    section = f'\n[versions."{LATER}"]\ncommit = "{git(remote, "rev-parse", "HEAD")}"\n'
    world.edit_lock(lambda text: text.replace("\n[patches]", f"{section}\n[patches]"))
    (world.root / "patches/next").mkdir()
    first = edit(A, "a_3", "A_three").replace("@@ -2,3 +2,3 @@", "@@ -3,3 +3,3 @@")
    (world.root / "patches/next" / OWN).write_text(HEADER + first)
    second = world.patch_text("0002-second").replace(" a_10\n", " a_ten\n")
    (world.root / "patches/next/0002-second.patch").write_text(second)
    assert world.run("refresh", "--next", remote).code == 0
    shutil.rmtree(world.checkout)
    result = world.run("fetch", world.checkout, "--next", remote)
    assert result.code == 0, result.errors
    return world


def test_its_own_patches_are_applied_and_taken_back_byte_for_byte(following):
    original = following.files()
    assert following.text("README.md") == LATER_UPSTREAM["README.md"]
    assert following.apply().code == 0
    assert "A_three" in following.text(A) and "B_three" in following.text(B)
    assert following.apply().out == ["already applied"]
    assert following.apply("--status").out[0].startswith("applied: ")
    assert following.apply("--revert").code == 0
    assert following.files() == original


def test_edits_of_it_go_into_a_patch_of_its_own_and_releases_keep_theirs(following):
    before = following.patch_text("0001-first")
    following.apply()
    following.replace(A, "A_three", "A_3")
    result = following.run(
        "refresh", following.checkout, "--next", following.base / "remote", "--into", "0001"
    )
    assert result.out[:2] == ["1 edited", A]
    assert following.patch_text("0001-first") == before
    assert "+A_3\n" in following.patch_text("next/0001-first")
    state = snapshot(following.root)
    assert following.run("refresh", "--next", following.base / "remote").code == 0
    assert following.run("refresh", "--check").code == 0
    assert snapshot(following.root) == state
    assert following.apply().out == ["already applied"]


def test_without_its_git_directory_a_changed_patch_is_named_stale(following):
    following.patch("0003-third", edit(B, "b_6", "B_6").replace("-2,3 +2,3", "-5,3 +5,3")
                    .replace("_2\n", "_5\n").replace("_4\n", "_7\n"))  # fmt: skip
    line = f"{LATER} in the lock is stale: refresh with --next GITDIR"
    assert line in following.run("refresh").out
    assert following.run("refresh", "--check").errors == [f"error: {line}"]
    assert following.run("refresh", "--next", following.base / "remote").code == 0
    assert following.run("refresh", "--check").code == 0


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["--next", "nowhere"], 1, "nowhere is not a git directory"),
        (["--next", "."], 4, "has no commit"),
        (["--next", "remote", "--git", "remote"], 2, "give one"),
        (["--version", LATER], 3, "give a git directory that has it with --next"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(following, monkeypatch, args, code, message):
    monkeypatch.chdir(following.base)
    result = following.run("fetch", "new", *args)
    assert (result.code, len(result.errors)) == (code, 1)
    assert message in result.errors[0]
    assert not (following.base / "new").exists()


def test_another_tree_than_the_locks_is_refused(following):
    following.edit_lock(lambda text: text.replace(f'"{A}" = ["', f'"{A}" = ["0', 3))
    result = following.run("fetch", following.base / "new", "--next", following.base / "remote")
    assert (result.code, len(result.errors)) == (4, 1)
    assert f"{A} differs from the lock: nothing kept" in result.errors[0]
