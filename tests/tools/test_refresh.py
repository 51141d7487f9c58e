# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, canonical patches, and the way back from an applied checkout to the patches."""

import tomllib

import pytest

from mini import HEADER, LATER, PIN, SECOND, UPSTREAM, World, edit, snapshot
from overlay.rules import MOST_LINES, MOST_PATCHES

A, B = "megatron/core/a.py", "megatron/core/sub/b.py"


def patches(world: World) -> dict[str, tuple]:
    return snapshot(world.root / "patches")


def refresh(world: World, *args: str):
    return world.run("refresh", world.checkout, *args)


def test_refresh_without_edits_gives_the_same_bytes(world):
    before = patches(world)
    assert world.lock().out == ["patches and lock are up to date"]
    world.apply()
    assert refresh(world).code == 0
    assert patches(world) == before


def test_the_lock_has_every_version_and_shares_equal_entries(world):
    table = tomllib.loads((world.root / "patches/upstream.toml").read_text())
    assert list(table["versions"]) == [PIN, SECOND]
    assert set(table["files"][A]["before"]) == {PIN, SECOND}
    assert isinstance(table["files"][B]["before"], str)


def test_a_file_that_one_version_lacks_is_locked_for_the_others(world):
    world.add_version(LATER, UPSTREAM | {"megatron/core/new/deep/module.py": "theirs\n"})
    world.lock()
    table = tomllib.loads((world.root / "patches/upstream.toml").read_text())
    assert list(table["files"]["megatron/core/new/deep/module.py"]["before"]) == [LATER]


def test_a_version_that_the_patches_do_not_fit_is_refused(world):
    world.add_version(LATER, {path: text for path, text in UPSTREAM.items() if path != B})
    result = world.run("refresh")
    assert (result.code, len(result.errors)) == (1, 1)
    assert f"on {LATER}: patches/0001-first.patch: upstream has no {B}" in result.errors[0]


def test_a_hand_written_patch_becomes_canonical(world):
    canonical = world.patch_text("0001-first")
    wide = edit(A, "a_3", "A_three")
    wide = wide.replace("@@ -2,3 +2,3 @@", "index 1..2 100644\n@@ -1,5 +1,5 @@ heading")
    wide = wide.replace("--- a", "--- a", 1).replace("index 1..2 100644\n@@", "@@")
    wide = wide.replace(" a_2\n", " a_1\n a_2\n").replace(" a_4\n", " a_4\n a_5\n")
    world.patch("0001-first", wide + edit(B, "b_3", "B_three"), "\n" + HEADER)
    assert world.lock().out == ["wrote patches/0001-first.patch"]
    assert world.patch_text("0001-first") == canonical


def test_check_names_what_is_stale_and_writes_nothing(world):
    (world.root / "megatron_overlay/megatron/core/replaced.py").write_text("edited\n")
    before = patches(world)
    result = world.run("refresh", "--check")
    assert result.code == 1
    assert result.errors == ["error: patches/upstream.toml is stale: run `make lock`"]
    assert patches(world) == before


@pytest.mark.parametrize(
    "name, diff, reason",
    [
        ("0003-absent", edit("megatron/core/none.py", "a_3", "x"), "upstream has no"),
        ("0003-replaced", edit("megatron/core/replaced.py", "old_3", "x"), "both an overlay file"),
        ("0003-stale", edit(A, "a_3", "x"), "does not apply"),
        ("0003-empty", "", "changes nothing"),
        ("0002-again", edit(A, "a_4", "x"), "same number"),
        ("third", "", "not named NNNN-topic.patch"),
    ],
)
def test_a_patch_that_cannot_stand_is_refused(world, name, diff, reason):
    world.patch(name, diff)
    before = patches(world)
    result = world.run("refresh")
    assert (result.code, len(result.errors)) == (1, 1)
    assert reason in result.errors[0]
    assert patches(world) == before


@pytest.mark.parametrize(
    "path, old, new, into, owner",
    [
        (B, "B_three", "B_33", [], "0001-first"),  # the only patch of its file
        (A, "A_three", "A_33", ["0001"], "0001-first"),  # and through the later one
        (A, "A_three", "A_33", ["0002", f"0001:{A}"], "0001-first"),
        (B, "b_9", "B_nine", ["0000"], "0000-new"),  # before the one that touches its file
        ("megatron/core/package_info.py", "'\n", "'\nhook()\n", ["0003"], "0003-new"),
    ],
)
def test_an_edit_goes_into_its_patch_and_no_other(world, path, old, new, into, owner):
    original = snapshot(world.checkout)
    world.apply()
    texts = {name: world.patch_text(name) for name in ("0001-first", "0002-second")}
    if owner.endswith("new"):
        world.patch(owner, "")
    world.replace(path, old, new)
    edited = world.files()
    result = refresh(world, *(word for number in into for word in ("--into", number)))
    assert result.code == 0, result.errors
    assert new.split("\n")[-2 if "\n" in new else 0] in world.patch_text(owner)
    assert {n: world.patch_text(n) for n in texts if n != owner} == {
        n: text for n, text in texts.items() if n != owner
    }
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
        ("megatron/core/package_info.py", "'\n", "'\nhook()\n", [], "belongs to no patch"),
        (B, "b_9\n", "b_9\n<<<<<<< ours\n", [], "conflict markers left"),
    ],
)
def test_an_edit_without_an_owner_is_refused(world, path, old, new, into, reason):
    world.apply()
    world.replace(path, old, new)
    before = patches(world)
    result = refresh(world, *into)
    assert (result.code, len(result.errors)) == (1, 1)
    assert reason in result.errors[0]
    assert patches(world) == before


def test_a_patch_whose_change_is_taken_back_is_dropped(world):
    world.apply()
    world.replace("megatron/core/a.py", "A_ten_and_a_half\n", "")
    assert refresh(world, "--into", "0002").code == 0
    assert not (world.root / "patches/0002-second.patch").exists()
    assert world.apply().out == ["already applied"]


def test_overlay_and_new_files_are_left_alone(world):
    world.apply()
    (world.checkout / "megatron/core/mine.py").write_text("mine\n")
    (world.checkout / "megatron/core/replaced.py").write_text("edited\n")
    before = snapshot(world.root)
    assert refresh(world).code == 0
    assert snapshot(world.root) == before


def test_a_checkout_without_the_present_patches_is_refused(world):
    assert "has not the patches for 1.2.3 applied" in refresh(world).errors[0]
    world.apply()
    world.edit_patch_set()
    assert "has not the present patches applied" in refresh(world).errors[0]


def test_headers_in_order_pass(world):
    assert world.run("headers").out == [
        "2 patch headers are in order, 5 changed lines; 0 replacements at run time are declared"
    ]


LARGE = edit(A, "a_3", "A").replace("+A\n", "+line\n" * 41).replace("+2,3", "+2,43")
HUGE = LARGE.replace("+line\n", "+line\n" * 11).replace("+2,43", f"+2,{41 * 11 + 2}")
WHY = HEADER.strip() + "\nWhy-Not-A-Hook: it is a test\n\n"


@pytest.mark.parametrize(
    "header, diff, problem",
    [
        *((HEADER.replace(f"{field}: ", "x "), "", "unknown or repeated header line") for field in
          ("Description", "Feature", "Upstream-Status", "Drop-When")),
        *((HEADER.replace(f"{line}\n", ""), "", f"no {line.partition(':')[0]} in the header")
          for line in HEADER.splitlines() if line),
        *((HEADER.replace("pending", status), "", f"Upstream-Status is {status!r}")
          for status in ("done", "submitted", "landed")),
        (HEADER, LARGE, "42 changed lines (over 40), no Why-Not-A-Hook"),
        (WHY, LARGE, None),
        (WHY, HUGE, f"over {MOST_LINES}"),
    ],
)  # fmt: skip
def test_headers_and_sizes(world, header, diff, problem):
    world.patch("0001-first", diff or edit(A, "a_3", "A"), header)
    result = world.run("headers")
    assert result.code == bool(problem)
    assert (problem or "") in "\n".join(result.errors)


def test_too_many_patches_are_refused(world):
    for number in range(MOST_PATCHES):
        world.patch(f"1{number:03}-more", edit(A, "a_3", "A"))
    assert f"over {MOST_PATCHES}" in world.run("headers").errors[0]
