# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, canonical patches, and the way back from an applied checkout to the patches."""

import pytest

from mini import HEADER, UPSTREAM, World, edit, snapshot


def patches(world: World) -> dict[str, tuple]:
    return snapshot(world.root / "patches")


def export(world: World, *args: str):
    return world.run("export", world.checkout, "--upstream", world.upstream, *args)


def replace(world: World, path: str, old: str, new: str) -> None:
    text = world.text(path)
    assert old in text
    (world.checkout / path).write_text(text.replace(old, new))


def test_export_of_an_unedited_checkout_gives_the_same_bytes(world):
    world.apply()
    before = patches(world)
    assert export(world).code == 0
    assert patches(world) == before


def test_lock_is_stable(world):
    before = patches(world)
    assert world.lock().out == ["patches and lock are up to date"]
    assert patches(world) == before


def test_lock_makes_a_hand_written_patch_canonical(world):
    canonical = (world.root / "patches/0001-first.patch").read_bytes()
    wide = edit("megatron/core/a.py", "a 3", "A three").replace(
        "@@ -2,3", "index 1..2 100644\n@@ -2,3"
    )
    wide = wide.replace("index 1..2 100644\n@@ -2,3 +2,3 @@", "@@ -1,5 +1,5 @@ heading")
    wide = wide.replace(" a 2\n", " a 1\n a 2\n").replace(" a 4\n", " a 4\n a 5\n")
    world.patch(
        "0001-first", wide + edit("megatron/core/sub/b.py", "b 3", "B three"), "\n" + HEADER
    )
    assert world.lock().out == ["wrote patches/0001-first.patch"]
    assert (world.root / "patches/0001-first.patch").read_bytes() == canonical


def test_lock_check_names_what_is_stale_and_writes_nothing(world):
    (world.root / "megatron_overlay/megatron/core/replaced.py").write_text("edited\n")
    before = patches(world)
    result = world.run("lock", "--check", "--upstream", world.upstream)
    assert result.code == 1
    assert result.errors == ["error: patches/upstream.toml is stale: run `make lock`"]
    assert patches(world) == before


def test_lock_lists_patches_by_number(world):
    world.patch("0000-earliest", edit("megatron/core/replaced2.py", "c 3", "C"))
    (world.upstream / "megatron/core/replaced2.py").write_text(
        UPSTREAM["megatron/core/a.py"].replace("a ", "c ")
    )
    world.lock()
    series = (world.root / "patches/series").read_text().split()
    assert series == ["0000-earliest.patch", "0001-first.patch", "0002-second.patch"]


@pytest.mark.parametrize(
    "name, diff, reason",
    [
        ("0003-absent", edit("megatron/core/none.py", "a 3", "x"), "upstream has no"),
        ("0003-replaced", edit("megatron/core/replaced.py", "old 3", "x"), "both an overlay file"),
        ("0003-stale", edit("megatron/core/a.py", "a 3", "x"), "does not apply"),
        ("0003-empty", "", "changes nothing"),
        ("0002-again", edit("megatron/core/a.py", "a 4", "x"), "same number"),
        ("third", "", "not named NNNN-topic.patch"),
    ],
)
def test_lock_refuses_a_patch_that_cannot_stand(world, name, diff, reason):
    world.patch(name, diff)
    before = patches(world)
    result = world.run("lock", "--upstream", world.upstream)
    assert (result.code, len(result.errors)) == (1, 1)
    assert reason in result.errors[0]
    assert patches(world) == before


def test_an_edit_goes_into_the_only_patch_of_its_file(world):
    world.apply()
    replace(world, "megatron/core/sub/b.py", "B three", "B 3!")
    result = export(world)
    assert result.code == 0, result.errors
    assert "+B 3!" in (world.root / "patches/0001-first.patch").read_text()
    assert world.apply().code == 0
    assert world.apply("--status").out[0].startswith("applied: ")


def test_an_edit_of_a_file_with_two_patches_needs_a_name(world):
    world.apply()
    replace(world, "megatron/core/a.py", "A three", "A 3!")
    before = patches(world)
    result = export(world)
    assert result.code == 1
    assert "name one with --into NNNN" in result.errors[0]
    assert patches(world) == before


def test_an_edit_goes_into_the_named_patch_and_through_the_later_ones(world):
    world.apply()
    replace(world, "megatron/core/a.py", "A three", "A 3!")
    edited = world.text("megatron/core/a.py")
    second = (world.root / "patches/0002-second.patch").read_bytes()
    assert export(world, "--into", "0001").code == 0
    assert "+A 3!" in (world.root / "patches/0001-first.patch").read_text()
    assert (world.root / "patches/0002-second.patch").read_bytes() == second
    assert world.apply().code == 0
    assert world.text("megatron/core/a.py") == edited


def test_an_edit_can_go_into_a_patch_before_the_one_that_touches_its_file(world):
    world.apply()
    new = world.patch("0000-zeroth", "")
    replace(world, "megatron/core/sub/b.py", "b 9", "B nine")
    edited = world.text("megatron/core/sub/b.py")
    assert export(world, "--into", "0000").code == 0
    assert "+B nine" in new.read_text()
    assert "B nine" not in (world.root / "patches/0001-first.patch").read_text()
    assert world.apply().code == 0
    assert world.text("megatron/core/sub/b.py") == edited


def test_an_edit_of_an_untouched_file_fills_a_new_patch(world):
    original = snapshot(world.checkout)
    world.apply()
    (world.checkout / "megatron/core/package_info.py").write_text(
        UPSTREAM["megatron/core/package_info.py"] + "hook()\n"
    )
    new = world.patch("0003-third", "")
    assert export(world, "--into", "0003").code == 0
    assert "+hook()" in new.read_text()
    assert world.apply().out == ["already applied"]
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


def test_export_leaves_overlay_and_new_files_alone(world):
    world.apply()
    (world.checkout / "megatron/core/mine.py").write_text("mine\n")
    (world.checkout / "megatron/core/replaced.py").write_text("edited\n")
    before = snapshot(world.root)
    assert export(world).code == 0
    assert snapshot(world.root) == before


def test_export_from_a_checkout_without_the_patches_is_refused(world):
    result = export(world)
    assert result.code == 1
    assert "has not the present patches applied" in result.errors[0]


def test_headers_in_order_pass(world):
    assert world.run("headers").out == ["2 patch headers are in order"]


@pytest.mark.parametrize("field", ["Description", "Feature", "Upstream-Status", "Drop-When"])
def test_a_patch_without_a_header_field_is_refused(world, field):
    lines = [line for line in HEADER.splitlines() if not line.startswith(field)]
    diff = edit("megatron/core/a.py", "a 3", "A")
    world.patch("0001-first", diff, "\n".join(lines) + "\n\n")
    result = world.run("headers")
    assert result.code == 1
    assert result.errors == [f"error: patches/0001-first.patch: no {field} in the header"]


@pytest.mark.parametrize("status", ["done", "submitted", "landed"])
def test_an_unknown_upstream_status_is_refused(world, status):
    header = HEADER.replace("pending", status)
    world.patch("0001-first", edit("megatron/core/a.py", "a 3", "A"), header)
    assert "Upstream-Status" in world.run("headers").errors[0]


def test_a_large_patch_must_say_why_it_is_no_hook(world):
    lines = "".join(f"+line {number}\n" for number in range(41))
    diff = edit("megatron/core/a.py", "a 3", "A three").replace("+A three\n", lines)
    diff = diff.replace("+2,3", "+2,43")
    world.patch("0001-first", diff)
    assert "no Why-Not-A-Hook" in world.run("headers").errors[0]
    world.patch("0001-first", diff, HEADER.strip() + "\nWhy-Not-A-Hook: it is a test\n\n")
    assert world.run("headers").code == 0
