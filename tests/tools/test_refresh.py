# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, canonical patches, and the way back from an applied checkout to the patches."""

import tomllib

import pytest

from mini import HEADER, LATER, PIN, SECOND, UPSTREAM, World, edit, snapshot

A, B, INFO = "megatron/core/a.py", "megatron/core/sub/b.py", "megatron/core/package_info.py"
MODULE = "megatron/core/new/deep/module.py"


def refresh(world: World, *args: str):
    return world.run("refresh", world.checkout, *args)


def refused(world: World, *args: object, naming: str) -> None:
    """Run refresh; it must fail in one line, and leave the patches as they are."""
    before = snapshot(world.root / "patches")
    result = world.run("refresh", *args)
    assert (result.code, len(result.errors)) == (1, 1)
    assert naming in result.errors[0]
    assert snapshot(world.root / "patches") == before


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


def test_the_lock_has_every_version_that_has_a_file_and_shares_equal_entries(world):
    world.add_version(LATER, UPSTREAM | {MODULE: "theirs\n"})
    world.lock()
    table = tomllib.loads((world.root / "patches/upstream.toml").read_text())
    assert list(table["versions"]) == [PIN, SECOND, LATER]
    assert set(table["files"][A]["before"]) == {PIN, SECOND, LATER}
    assert isinstance(table["files"][B]["before"], str)
    assert list(table["files"][MODULE]["before"]) == [LATER]


def stale(world: World) -> None:
    (world.root / "megatron_overlay/megatron/core/replaced.py").write_text("edited\n")


def without_b(world: World) -> None:
    world.add_version(LATER, {path: text for path, text in UPSTREAM.items() if path != B})


@pytest.mark.parametrize(
    "arrange, args, naming",
    [
        (stale, ["--check"], "patches/upstream.toml is stale: run `make lock`"),
        (without_b, [], f"on {LATER}: patches/0001-first.patch: upstream has no {B}"),
        *((lambda world, one=one: world.patch(*one[:2]), [], one[2]) for one in (
            ("0003-absent", edit("megatron/core/none.py", "a_3", "x"), "upstream has no"),
            ("0003-replaced", edit("megatron/core/replaced.py", "old_3", "x"),
             "both an overlay file"),
            ("0003-stale", edit(A, "a_3", "x"), "does not apply"),
            ("0003-empty", "", "changes nothing"),
            ("0002-again", edit(A, "a_4", "x"), "same number"),
            ("third", "", "not named NNNN-topic.patch"),
        )),
    ],
)  # fmt: skip
def test_a_patch_set_that_cannot_stand_is_refused(world, arrange, args, naming):
    arrange(world)
    refused(world, *args, naming=naming)


@pytest.mark.parametrize(
    "path, old, new, into, owner",
    [
        (B, "B_three", "B_33", [], "0001-first"),  # the only patch of its file
        (A, "A_three", "A_33", ["0001"], "0001-first"),  # and through the later one
        (A, "A_three", "A_33", ["0002", f"0001:{A}"], "0001-first"),
        (B, "b_9", "B_nine", ["0000"], "0000-new"),  # before the one that touches its file
        (INFO, "'\n", "'\nhook()\n", ["0003"], "0003-new"),
    ],
)
def test_an_edit_goes_into_its_patch_and_no_other(world, path, old, new, into, owner):
    original = snapshot(world.checkout)
    world.apply()
    others = {"0001-first", "0002-second"} - {owner}
    texts = {name: world.patch_text(name) for name in others}
    if owner.endswith("new"):
        world.patch(owner, "")
    world.replace(path, old, new)
    edited = world.files()
    result = refresh(world, *(word for number in into for word in ("--into", number)))
    assert result.code == 0, result.errors
    assert new.strip("'\n") in world.patch_text(owner)
    assert {name: world.patch_text(name) for name in others} == texts
    assert world.apply("--status").out[0].startswith("applied: ")
    assert world.apply().out == ["already applied"]
    assert world.files() == edited
    assert refresh(world).out[-1] == "patches and lock are up to date"
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


@pytest.mark.parametrize(
    "path, old, new, into, reason",
    [
        (A, "A_three", "A_33", [], "belongs to 0001-first.patch, 0002-second.patch: name one"),
        (A, "A_ten_and", "A_10_and", ["--into", "0001"], "meets lines of patches after 0001"),
        (A, "A_three", "A_33", ["--into", "0009"], "no patches/0009-*.patch"),
        (INFO, "'\n", "'\nhook()\n", [], "belongs to no patch"),
        (B, "b_9\n", "b_9\n<<<<<<< ours\n", [], "conflict markers left"),
    ],
)
def test_an_edit_without_an_owner_is_refused(world, path, old, new, into, reason):
    world.apply()
    world.replace(path, old, new)
    refused(world, world.checkout, *into, naming=reason)


def test_what_is_no_edit_of_upstreams_is_left_alone_and_an_empty_patch_dropped(world):
    world.apply()
    (world.checkout / "megatron/core/mine.py").write_text("mine\n")
    (world.checkout / "megatron/core/replaced.py").write_text("edited\n")
    before = snapshot(world.root)
    assert refresh(world).code == 0
    assert snapshot(world.root) == before
    world.replace("megatron/core/replaced.py", "edited", "ours_instead")
    world.replace(A, "A_ten_and_a_half\n", "")
    assert refresh(world, "--into", "0002").code == 0
    assert not (world.root / "patches/0002-second.patch").exists()
    assert world.apply().out == ["already applied"]


def test_a_checkout_without_the_present_patches_is_refused(world):
    refused(world, world.checkout, naming="has not the patches for 1.2.3 applied")
    world.apply()
    world.edit_patch_set()
    refused(world, world.checkout, naming="has not the present patches applied")
