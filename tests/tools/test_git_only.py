# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Patches of files that git checkouts have and sdists lack."""

import pytest

from mini import (
    PIN,
    SECOND,
    SECOND_UPSTREAM,
    UPSTREAM,
    World,
    edit,
    git,
    make_repository,
    numbered,
    write_tree,
)

SCRIPT, NAME, LOCK = "examples/run_it.py", "0003-script", "patches/upstream.toml"
DIFF = edit(SCRIPT, "s_3", "S_three")
ABSENT = f"left out: {NAME}.patch: only git checkouts have {SCRIPT}"
CHANGED = f"left out: {NAME}.patch: this tree has changed {SCRIPT}"


@pytest.fixture
def locked(world: World) -> World:
    """The patch set with a patch of SCRIPT, and a pristine git checkout of the pin."""
    world.apply()
    write_tree(world.checkout, {SCRIPT: numbered("s")})
    world.patch(NAME, DIFF)
    result = world.run("refresh", world.checkout)
    assert result.code == 0, result.errors
    assert world.apply("--revert").code == 0
    return world


def without_script(world: World) -> None:
    (world.checkout / SCRIPT).unlink()
    (world.checkout / SCRIPT).parent.rmdir()


@pytest.mark.parametrize("files", [UPSTREAM, SECOND_UPSTREAM], ids=[PIN, SECOND])
def test_a_git_checkout_of_any_version_gets_the_patch_and_gives_it_back(locked, files):
    locked.as_git(files | {SCRIPT: numbered("s")})
    before = locked.files()
    assert SCRIPT in locked.apply("--check").out
    assert locked.apply().out == ["applied: 6 files changed"]
    assert "S_three" in locked.text(SCRIPT)
    assert locked.apply().out == ["already applied"]
    locked.apply("--revert")
    assert locked.files() == before


def test_where_the_file_is_absent_the_patch_is_left_out_until_it_comes(locked):
    without_script(locked)
    before = locked.files()
    assert locked.apply("--status").out == ["not applied", ABSENT]
    assert locked.apply("--check").out[-1] == ABSENT
    assert locked.apply().out == ["applied: 5 files changed", ABSENT]
    assert locked.apply().out == ["already applied", ABSENT]
    assert locked.apply("--status").out == ["applied: 5 files", ABSENT]
    write_tree(locked.checkout, {SCRIPT: numbered("s")})
    assert locked.apply("--status").out[0].startswith("applied: an earlier state")
    assert locked.apply().out == ["updated: 1 file changed"]
    assert "S_three" in locked.text(SCRIPT)
    assert locked.apply("--revert").code == 0
    without_script(locked)
    assert locked.files() == before


def test_a_changed_file_is_left_as_it_is_and_a_patched_one_refused(locked):
    locked.replace(SCRIPT, "s_12", "mine")
    assert locked.apply().out == ["applied: 5 files changed", CHANGED]
    assert locked.text(SCRIPT) == numbered("s", {12: "mine"})
    locked.apply("--revert")
    write_tree(locked.checkout, {SCRIPT: numbered("s", {3: "S_three"})})
    result = locked.apply()
    assert (result.code, len(result.errors)) == (4, 1)
    assert f"{SCRIPT} is patched already" in result.errors[0]


def test_refresh_without_the_file_keeps_the_patch_but_refuses_its_edit(locked):
    assert locked.run("refresh").out == ["patches and lock are up to date"]
    entry = (locked.root / LOCK).read_text().partition("\n[git_only]")[2]
    locked.add_version("1.2.5", UPSTREAM)
    locked.lock()
    assert SCRIPT in entry and (locked.root / LOCK).read_text().endswith(entry)
    locked.patch(NAME, DIFF.replace("S_three", "S3"))
    without_script(locked)
    for checkout in ((), (locked.checkout,)):
        result = locked.run("refresh", *checkout)
        assert (result.code, len(result.errors)) == (1, 1)
        assert f"patches/{NAME}.patch was edited: refresh with a git checkout" in result.errors[0]


def test_refresh_takes_edits_and_the_deletion_of_the_patch(locked):
    locked.apply()
    locked.replace("megatron/core/sub/b.py", "b_9", "b_nine")
    result = locked.run("refresh", locked.checkout, "--into", "0003")
    assert (result.code, len(result.errors)) == (1, 1)
    assert "make two patches of it" in result.errors[0]
    locked.replace("megatron/core/sub/b.py", "b_nine", "b_9")
    locked.replace(SCRIPT, "s_9", "s_nine")
    assert locked.run("refresh", locked.checkout).out[:2] == ["1 edited", SCRIPT]
    assert "+s_nine" in locked.patch_text(NAME)
    assert locked.apply().out == ["already applied"]
    (locked.root / f"patches/{NAME}.patch").unlink()
    assert locked.lock().out == [f"wrote {LOCK}"]
    assert SCRIPT not in (locked.root / LOCK).read_text()
    assert locked.apply().out == ["updated: 1 file changed"]
    assert locked.text(SCRIPT) == numbered("s")


@pytest.mark.parametrize(
    "files, state",
    [({SCRIPT: numbered("s")}, "applies"), ({}, "left out"), ({SCRIPT: "theirs\n"}, "conflicts")],
)
def test_drift_says_how_it_fares_and_a_clone_may_lack_it(locked, tmp_path, files, state):
    make_repository(tmp_path / "remote", UPSTREAM | files)
    git(tmp_path / "remote", "tag", f"v{PIN}")
    result = locked.run("fetch", tmp_path / "c", "--git", tmp_path / "remote")
    assert result.code == 0, result.errors
    result = locked.run("drift", tmp_path / "c")
    assert result.code == (state == "conflicts")
    assert any(line.split() == [*state.split(), f"{NAME}.patch"] for line in result.out)
