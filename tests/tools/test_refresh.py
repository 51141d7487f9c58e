# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, canonical patches, and the way back from an applied checkout."""

import pytest

import mini
from mini import HEADER, INFO, MODULE, REPLACED, SCRIPT, A, B, edit, numbered, snapshot
from overlay.patchset import Lock


def test_patches_become_canonical_and_then_stay_the_same_bytes(world):
    before = snapshot(world.root / "patches")
    world.apply()
    assert world.run("refresh", world.checkout).code == 0
    assert snapshot(world.root / "patches") == before
    wide = edit(A, "a_3", "A_three").replace("@@ -2,3 +2,3 @@", "@@ -1,5 +1,5 @@ heading")
    wide = wide.replace(" a_2\n", " a_1\n a_2\n").replace(" a_4\n", " a_4\n a_5\n")
    world.patch("0001-first", wide + edit(B, "b_3", "B_three"), "\n" + HEADER)
    assert world.lock().out == ["wrote patches/0001-first.patch"]
    assert snapshot(world.root / "patches") == before
    next((world.root / "build/cache").glob("main-*")).unlink()  # its table stays as it is
    assert world.lock().out == ["patches and lock are up to date"]


@pytest.mark.parametrize(
    "path, old, new, owner",
    [
        (B, "B_three", "B_33", "0001-first"),  # the only patch of its file
        (A, "A_three", "A_33", "0002-second"),  # the last one
        (A, "A_ten_and_a_half\n", "", "0002-second"),  # no diff is left
        (INFO, "'\n", "'\nhook()\n", "0003-new"),  # which has a header only
        (SCRIPT, "s_9", "s_nine", "0009-script"),
    ],
)
def test_an_edit_goes_into_its_patch_and_no_other(world, path, old, new, owner):
    original = snapshot(world.checkout)
    world.apply()
    others = {"0001-first", "0002-second", "0009-script"} - {owner}
    texts = {name: world.patch_text(name) for name in others}
    if owner.endswith("new"):
        world.patch(owner, "")
    world.replace(path, old, new)
    (world.checkout / "megatron/core/mine.py").write_text("mine\n")  # no edit of upstream's
    result = world.run("refresh", world.checkout)
    assert result.code == 0, result.errors
    assert result.out[:2] == ["1 edited", path]
    assert new.strip("'\n") in world.patch_text(owner)
    assert (world.patch_text(owner) == HEADER) == (new == "")
    assert {name: world.patch_text(name) for name in others} == texts
    edited = world.files()
    assert world.apply("--status").out[0].startswith("applied: ")
    assert world.apply().out == ["already applied"]
    assert world.run("refresh", "--check").code == 0
    assert world.files() == edited
    (world.checkout / "megatron/core/mine.py").unlink()
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


def test_the_lock_has_every_version_that_has_a_file(world):
    world.add_version("9.0.0", mini.UPSTREAM | {MODULE: "theirs\n"})
    world.lock()
    files = Lock.read(world.root / "patches/upstream.toml").files
    assert list(files) == [mini.PIN, mini.LATER, "9.0.0"]
    having = [[v for v in files if path in files[v]] for path in (REPLACED, MODULE, SCRIPT)]
    assert having == [[*files], ["9.0.0"], [*files]]


def test_a_pristine_clone_gives_the_lock_its_git_only_files(world):
    changed = mini.CLONE | {SCRIPT: "s_0\n" + numbered("s")}
    world.as_tree(changed)
    assert world.apply().code == 4
    assert world.run("refresh", world.checkout).out[0] == "0 edited"
    assert world.apply().code == 0
    assert world.text(SCRIPT) == "s_0\n" + numbered("s", {3: "S_three"})
