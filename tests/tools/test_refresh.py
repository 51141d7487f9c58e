# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, canonical patches, the way back from an applied checkout, and the move of the pin."""

import shutil
import tomllib

import pytest

from mini import (
    HEADER,
    LATER,
    LATER_UPSTREAM,
    PIN,
    SECOND,
    UPSTREAM,
    World,
    edit,
    numbered,
    snapshot,
    write_tree,
)

A, B, INFO = "megatron/core/a.py", "megatron/core/sub/b.py", "megatron/core/package_info.py"
MODULE = "megatron/core/new/deep/module.py"


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


def without_b(world: World) -> None:
    world.add_version(LATER, {path: text for path, text in UPSTREAM.items() if path != B})


def stale(world: World) -> None:
    (world.root / "megatron_overlay/megatron/core/replaced.py").write_text("edited\n")


def patch(*args: str):
    return lambda world: world.patch(*args)


def edited(path: str, old: str, new: str):
    def arrange(world: World) -> None:
        world.apply()
        world.replace(path, old, new)

    return arrange


def outdated(world: World) -> None:
    world.apply()
    world.edit_patch_set()


CHECKOUT = "CHECKOUT"


@pytest.mark.parametrize(
    "arrange, args, naming",
    [
        (stale, ["--check"], "patches/upstream.toml is stale: run `make lock`"),
        (without_b, [], f"on {LATER}: patches/0001-first.patch: upstream has no {B}"),
        (patch("0003-absent", edit("megatron/core/none.py", "a_3", "x")), [], "upstream has no"),
        (patch("0003-replaced", edit("megatron/core/replaced.py", "old_3", "x")), [],
         "both an overlay file"),
        (patch("0003-stale", edit(A, "a_3", "x")), [], "does not apply"),
        (patch("0003-empty", ""), [], "changes nothing"),
        (patch("0002-again", edit(A, "a_4", "x")), [], "same number"),
        (patch("third", ""), [], "not named NNNN-topic.patch"),
        (patch("0003-new", f"diff --git a/{A} b/{A}\ndeleted file mode 100644\n"), [], "0003-new"),
        (edited(A, "A_three", "A_33"), [CHECKOUT],
         "belongs to 0001-first.patch, 0002-second.patch: name one"),
        (edited(A, "A_ten_and", "A_10_and"), [CHECKOUT, "--into", "0001"],
         "meets lines of patches after 0001"),
        (edited(A, "A_three", "A_33"), [CHECKOUT, "--into", "0009"], "no patches/0009-*.patch"),
        (edited(INFO, "'\n", "'\nhook()\n"), [CHECKOUT], "belongs to no patch"),
        (outdated, [CHECKOUT], "has not the present patches applied"),
        (lambda world: None, [CHECKOUT], "has not the present patches applied"),
        (lambda world: None, ["--pin", "9"], "the lock has no version 9: add it first"),
    ],
)  # fmt: skip
def test_what_cannot_stand_is_refused_in_one_line(world, arrange, args, naming):
    arrange(world)
    before = snapshot(world.root / "patches")
    result = world.run("refresh", *(world.checkout if arg == CHECKOUT else arg for arg in args))
    assert (result.code, len(result.errors)) == (1, 1), result
    assert naming in result.errors[0]
    assert snapshot(world.root / "patches") == before


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


def test_the_lock_has_every_version_that_has_a_file(world):
    world.add_version(LATER, UPSTREAM | {MODULE: "theirs\n"})
    world.lock()
    table = tomllib.loads((world.root / "patches/upstream.toml").read_text())
    assert list(table["versions"]) == list(table["files"]) == [PIN, SECOND, LATER]
    found = [[v for v in table["files"] if path in table["files"][v]] for path in (A, MODULE)]
    assert found == [[PIN, SECOND, LATER], [LATER]]


def test_the_pin_moves_and_what_conflicts_is_put_back_by_hand(world):
    world.add_version(LATER, LATER_UPSTREAM)
    assert "does not apply" in world.run("refresh").errors[0]
    world.drop_version(SECOND)
    result = world.run("refresh", "--pin", LATER)
    assert result.out[0] == f"conflict: {A} with 0002-second.patch"
    lock = tomllib.loads((world.root / "patches/upstream.toml").read_text())
    assert (lock["pin"], list(lock["files"]), list(lock["versions"])) == (LATER, [LATER], [LATER])
    assert "+A_three" in world.patch_text("0001-first")
    assert B not in world.patch_text("0001-first")  # upstream has our change already
    assert world.patch_text("0002-second") == HEADER
    shutil.rmtree(world.checkout)
    write_tree(world.checkout, LATER_UPSTREAM)
    assert world.apply().code == 0
    world.replace(A, "a_ten\n", "a_ten\nA_ten_and_a_half\n")
    assert refresh(world, "--into", "0002").code == 0
    assert "+A_ten_and_a_half" in world.patch_text("0002-second")
    assert world.text(A) == "a_0\n" + numbered("a", {3: "A_three", 10: "a_ten\nA_ten_and_a_half"})
    assert world.apply().out == ["already applied"]
    assert refresh(world).out[-1] == "patches and lock are up to date"
