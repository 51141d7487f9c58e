# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Patches of files that git checkouts have and sdists lack."""

import pytest

from mini import (
    HEADER,
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

SCRIPT, NAME = "examples/run_it.py", "0003-script"
DIFF = edit(SCRIPT, "s_3", "S_three")
ABSENT = f"left out: {NAME}.patch: {SCRIPT} is not in this tree"
CHANGED = f"left out: {NAME}.patch: {SCRIPT} has been changed"


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


def test_a_git_checkout_gets_the_patch_and_gives_it_back(locked):
    before = locked.files()
    assert locked.apply("--check").out == ["would change 6 files", *sorted(changed(locked))]
    assert locked.apply().out == ["applied: 6 files changed"]
    assert "S_three" in locked.text(SCRIPT)
    assert locked.apply().out == ["already applied"]
    assert locked.apply("--status").out == ["applied: 6 files"]
    locked.apply("--revert")
    assert locked.files() == before


def changed(world: World) -> list[str]:
    entries = ["examples/mimo/run.py", SCRIPT, "megatron/core/a.py", "megatron/core/sub/b.py"]
    return [*entries, "megatron/core/new/deep/module.py", "megatron/core/replaced.py"]


def test_an_sdist_leaves_it_out_with_a_notice(locked):
    without_script(locked)
    before = locked.files()
    assert locked.apply("--status").out == ["not applied", ABSENT]
    assert locked.apply("--check").out[-1] == ABSENT
    assert locked.apply().out == ["applied: 5 files changed", ABSENT]
    assert locked.apply().out == ["already applied", ABSENT]
    assert locked.apply("--status").out == ["applied: 5 files", ABSENT]
    assert locked.apply("--revert").code == 0
    assert locked.files() == before


def test_a_file_that_was_changed_is_left_as_it_is(locked):
    locked.replace(SCRIPT, "s_12", "mine")
    assert locked.apply().out == ["applied: 5 files changed", CHANGED]
    assert "mine" in locked.text(SCRIPT)
    assert "S_three" not in locked.text(SCRIPT)


def test_one_that_is_patched_without_its_original_is_refused(locked):
    locked.replace(SCRIPT, "s_3", "S_three")
    result = locked.apply()
    assert (result.code, len(result.errors)) == (4, 1)
    assert f"{SCRIPT} is patched already" in result.errors[0]


def test_a_file_that_comes_later_is_patched_by_the_next_run(locked):
    without_script(locked)
    locked.apply()
    write_tree(locked.checkout, {SCRIPT: numbered("s")})
    assert locked.apply("--status").out[0].startswith("applied: an earlier state")
    assert locked.apply().out == ["updated: 1 file changed"]
    assert "S_three" in locked.text(SCRIPT)


def test_an_edit_of_the_patched_file_is_not_lost(locked):
    locked.apply()
    locked.replace(SCRIPT, "s_12", "mine")
    for flags in ([], ["--revert"]):
        result = locked.apply(*flags)
        assert (result.code, len(result.errors)) == (5, 1)
        assert SCRIPT in result.errors[0]
    assert locked.apply("--status").out == ["modified since", SCRIPT]


def test_the_other_versions_of_the_lock_take_it_too(locked):
    locked.as_git(SECOND_UPSTREAM | {SCRIPT: numbered("s")})
    assert locked.apply().out == ["applied: 6 files changed"]
    assert "S_three" in locked.text(SCRIPT)


def test_refresh_without_a_checkout_keeps_patch_and_lock(locked):
    assert locked.run("refresh").out == ["patches and lock are up to date"]
    assert locked.run("refresh", "--check").code == 0


def test_refresh_without_a_checkout_refuses_an_edited_patch(locked):
    locked.patch(NAME, DIFF.replace("S_three", "S3"))
    for checkout in ((), (locked.checkout,)):
        if checkout:
            without_script(locked)
        result = locked.run("refresh", *checkout)
        assert (result.code, len(result.errors)) == (1, 1)
        assert f"patches/{NAME}.patch was edited: refresh with a git checkout" in result.errors[0]


def test_refresh_without_a_checkout_takes_a_deletion(locked):
    locked.apply()
    (locked.root / f"patches/{NAME}.patch").unlink()
    assert locked.lock().out == ["wrote patches/upstream.toml"]
    assert SCRIPT not in (locked.root / "patches/upstream.toml").read_text()
    assert locked.apply().out == ["updated: 1 file changed"]
    assert locked.text(SCRIPT) == numbered("s")


def test_a_version_that_comes_into_the_lock_takes_the_entry_over(locked):
    lock = (locked.root / "patches/upstream.toml").read_text()
    entry = lock[lock.index(f'[files."{SCRIPT}"]') :].split("\n\n")[0]
    locked.add_version("1.2.5", UPSTREAM)
    locked.lock()
    assert entry in (locked.root / "patches/upstream.toml").read_text()
    assert "git_only = true" in entry


def test_refresh_takes_an_edit_out_of_the_checkout(locked):
    locked.apply()
    locked.replace(SCRIPT, "s_9", "s_nine")
    result = locked.run("refresh", locked.checkout)
    assert result.out[:2] == ["1 edited", SCRIPT]
    assert "+s_nine" in locked.patch_text(NAME)
    assert locked.apply().out == ["already applied"]
    locked.apply("--revert")
    assert locked.text(SCRIPT) == numbered("s")


def test_a_hand_written_patch_becomes_canonical(locked):
    canonical = locked.patch_text(NAME)
    locked.apply()
    wide = DIFF.replace("@@ -2,3 +2,3 @@", "@@ -1,4 +1,4 @@ here").replace(" s_2\n", " s_1\n s_2\n")
    locked.patch(NAME, wide, "\n" + HEADER)
    assert locked.run("refresh", locked.checkout).code == 0
    assert locked.patch_text(NAME) == canonical


def test_a_patch_of_both_kinds_of_files_is_refused(locked):
    locked.apply()
    locked.replace("megatron/core/sub/b.py", "b_9", "b_nine")
    result = locked.run("refresh", locked.checkout, "--into", "0003")
    assert (result.code, len(result.errors)) == (1, 1)
    assert "make two patches of it" in result.errors[0]


def test_a_patch_of_what_neither_has_is_refused(world):
    world.patch(NAME, DIFF)
    result = world.run("refresh")
    assert (result.code, len(result.errors)) == (1, 1)
    assert f"upstream has no {SCRIPT}" in result.errors[0]


def test_a_three_way_merge_leaves_it_out(locked):
    locked.as_git(UPSTREAM | {SCRIPT: numbered("s", {12: "mine"})})
    result = locked.apply("--three-way")
    assert (result.code, len(result.out)) == (0, 2), result.errors
    assert result.out[1].startswith(f"left out: {NAME}.patch: ")
    assert locked.text(SCRIPT) == numbered("s", {12: "mine"})


@pytest.mark.parametrize(
    "script, state, code",
    [
        (numbered("s"), "applies", 0),
        ("s_0\n" + numbered("s"), "applies with offset", 0),
        (None, "left out", 0),
        (numbered("s", {3: "theirs"}), "conflicts", 1),
    ],
)
def test_drift_says_how_it_fares(locked, script, state, code):
    if script is None:
        without_script(locked)
    else:
        write_tree(locked.checkout, {SCRIPT: script})
    result = locked.run("drift", locked.checkout)
    assert result.code == code
    assert any(line.split() == [*state.split(), f"{NAME}.patch"] for line in result.out)


@pytest.mark.parametrize("version", [PIN, SECOND])
def test_a_clone_without_it_is_fetched(locked, tmp_path, version):
    files = {PIN: UPSTREAM, SECOND: SECOND_UPSTREAM}[version]
    make_repository(tmp_path / "remote", files)
    git(tmp_path / "remote", "tag", f"v{version}")
    result = locked.run("fetch", tmp_path / "c", "--version", version, "--git", tmp_path / "remote")
    assert result.code == 0, result.errors
