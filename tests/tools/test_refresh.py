# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, canonical patches, the way back from an applied checkout, and the move of the pin."""

import re

import pytest

import mini
from mini import HEADER, INFO, MODULE, REPLACED, SCRIPT, A, B, World, edit, numbered, snapshot
from overlay.patchset import Lock


def refresh(world: World, *args: str):
    return world.run("refresh", world.checkout, *args)


def test_patches_become_canonical_and_then_stay_the_same_bytes(world):
    before = snapshot(world.root / "patches")
    assert world.lock().out == ["patches and lock are up to date"]
    world.apply()
    assert refresh(world).code == 0
    assert snapshot(world.root / "patches") == before
    wide = edit(A, "a_3", "A_three").replace("@@ -2,3 +2,3 @@", "@@ -1,5 +1,5 @@ heading")
    wide = wide.replace(" a_2\n", " a_1\n a_2\n").replace(" a_4\n", " a_4\n a_5\n")
    world.patch("0001-first", wide + edit(B, "b_3", "B_three"), "\n" + HEADER)
    assert world.lock().out == ["wrote patches/0001-first.patch"]
    assert snapshot(world.root / "patches") == before


@pytest.mark.parametrize(
    "path, old, new, into, owner",
    [
        (B, "B_three", "B_33", None, "0001-first"),  # the only patch of its file
        (A, "A_three", "A_33", "0001", "0001-first"),  # and through the later one
        (A, "A_ten_and_a_half\n", "", "0002", "0002-second"),  # of which nothing is left
        (B, "b_9", "B_nine", "0000", "0000-new"),  # before the one that touches its file
        (INFO, "'\n", "'\nhook()\n", "0003", "0003-new"),
        (SCRIPT, "s_9", "s_nine", None, "0009-script"),
    ],
)
def test_an_edit_goes_into_its_patch_and_no_other(world, path, old, new, into, owner):
    original = snapshot(world.checkout)
    world.apply()
    others = {"0001-first", "0002-second", "0009-script"} - {owner}
    texts = {name: world.patch_text(name) for name in others}
    if owner.endswith("new"):
        world.patch(owner, "")
    world.replace(path, old, new)
    (world.checkout / "megatron/core/mine.py").write_text("mine\n")
    (world.checkout / REPLACED).write_text("mine\n")  # neither is an edit of upstream's
    result = refresh(world, *(["--into", f"{into}:{path}"] if into else []))
    assert result.code == 0, result.errors
    assert result.out[:2] == ["1 edited", path]
    assert new.strip("'\n") in world.patch_text(owner)
    assert (world.patch_text(owner) == HEADER) == (new == "")
    assert {name: world.patch_text(name) for name in others} == texts
    world.replace(REPLACED, "mine", "ours_instead")
    edited = world.files()
    assert world.apply("--status").out[0].startswith("applied: ")
    assert world.apply().out == ["already applied"]
    assert refresh(world).out[-1] == "patches and lock are up to date"
    assert world.files() == edited
    (world.checkout / "megatron/core/mine.py").unlink()
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


def test_edits_of_the_later_version_go_into_patches_of_its_own(world):
    world.as_tree(mini.LATER_UPSTREAM)
    world.apply()
    texts = [world.patch_text(name) for name in ("0001-first", "0009-script")]
    world.replace(A, "A_three", "A_3")
    world.replace(SCRIPT, "S_three", "S_3")
    assert refresh(world, "--into", f"0001:{A}").out[0] == "2 edited"
    assert [world.patch_text(name) for name in ("0001-first", "0009-script")] == texts
    assert "+A_3\n" in world.patch_text("next/0001-first")
    assert "+S_3\n" in world.patch_text("next/0009-script")
    assert world.apply().out == ["already applied"]
    assert world.run("refresh", "--check").code == 0
    next((world.root / "build/cache").glob("main-*")).unlink()
    assert world.run("refresh", "--check").code == 0
    assert "fetch it with --next" in refresh(world).errors[0]


def test_the_lock_has_every_version_that_has_a_file(world):
    world.add_version("9.0.0", mini.UPSTREAM | {MODULE: "theirs\n"})
    world.lock()
    files = Lock.read(world.root / "patches/upstream.toml").files
    assert list(files) == [mini.PIN, mini.SECOND, mini.LATER, "9.0.0"]
    having = [[v for v in files if path in files[v]] for path in (REPLACED, MODULE, SCRIPT)]
    assert having == [[*files], ["9.0.0"], [*files]]


def test_the_pin_moves_and_what_conflicts_is_put_back_by_hand(world):
    new, path = "1.2.9", "patches/upstream.toml"
    files = mini.LATER_UPSTREAM | {INFO: mini.package_info(new)}
    world.add_version(new, {path: text for path, text in files.items() if path != SCRIPT})
    assert "does not apply" in world.run("refresh").errors[0]
    section = rf'\n\[versions."{mini.SECOND}"\]\n(\w+ = .*\n)+'
    world.edit_lock(lambda text: re.sub(section, "", text))
    result = world.run("refresh", "--pin", new)
    assert result.out[0] == f"conflict: {A} with 0002-second.patch"
    lock = Lock.read(world.root / path)
    assert (lock.pin, [*lock.versions], [*lock.files]) == (
        new,
        [mini.LATER, new],
        [mini.LATER, new],
    )
    assert "+A_three" in world.patch_text("0001-first")
    assert B not in world.patch_text("0001-first")  # upstream has our change already
    assert world.patch_text("0002-second") == HEADER
    assert "patches/0002-second.patch: it changes nothing" in world.run("headers").errors[0]
    world.as_tree(files)
    assert world.apply().code == 0
    world.replace(A, "a_ten\n", "a_ten\nA_ten_and_a_half\n")
    assert refresh(world, "--into", f"0002:{A}").code == 0
    assert "+A_ten_and_a_half" in world.patch_text("0002-second")
    assert world.text(A) == "a_0\n" + numbered("a", {3: "A_three", 10: "a_ten\nA_ten_and_a_half"})
    assert world.apply().out == ["already applied"]


def test_a_pristine_clone_gives_the_lock_its_git_only_files(world):
    changed = mini.CLONE | {SCRIPT: "s_0\n" + numbered("s")}
    world.as_tree(changed)
    assert world.apply().code == 4
    assert refresh(world).out[0] == "0 edited: nothing is applied"
    assert world.apply().code == 0
    assert world.text(SCRIPT) == "s_0\n" + numbered("s", {3: "S_three"})
