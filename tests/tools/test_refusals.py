# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of apply: the exit code, the files that are named, and that nothing changes."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from mini import HEADER, STATE, World, edit, package_info, snapshot, write_tree
from overlay.checkout import sha256

ESCAPE = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1,1 +1,1 @@\n-secret\n+stolen\n"
NEW_LINK = (
    "diff --git a/megatron/evil b/megatron/evil\nnew file mode 120000\n"
    "--- /dev/null\n+++ b/megatron/evil\n@@ -0,0 +1 @@\n+../../outside\n"
    "\\ No newline at end of file\n"
)


def refused(world: World, code: int, *flags: str, naming: list[str]) -> None:
    """Run apply; it must fail with ``code``, print error lines only, and change nothing."""
    before = snapshot(world.base)
    result = world.apply(*flags)
    assert result.code == code, result
    assert all(line.startswith("error: ") for line in result.errors)
    assert all(part in "\n".join(result.errors) for part in naming), result.errors
    assert snapshot(world.base) == before


@pytest.mark.parametrize("args", [(), ("x", "--check", "--revert"), ("x", "--no-such")])
def test_usage_errors_exit_2_in_one_line(world, args):
    result = world.run("apply", *args)
    assert (result.code, len(result.errors)) == (2, 1)


def write(path: str, text: str):
    def arrange(world: World) -> None:
        write_tree(world.checkout, {path: text})

    return arrange


def remove(path: str):
    return lambda world: (world.checkout / path).unlink()


def make_folder(path: str):
    return lambda world: (world.checkout / path).mkdir(parents=True)


def move_out(path: str):
    """Leave a symlink to where the path went, outside the checkout."""

    def arrange(world: World) -> None:
        shutil.move(world.checkout / path, world.base / "outside")
        (world.checkout / path).symlink_to(world.base / "outside")

    return arrange


def link_private_folder(world: World) -> None:
    (world.base / "outside").mkdir()
    (world.checkout / STATE).symlink_to(world.base / "outside")


A, RUN, INFO = "megatron/core/a.py", "examples/mimo/run.py", "megatron/core/package_info.py"
SUB, REPLACED = "megatron/core/sub", "megatron/core/replaced.py"


@pytest.mark.parametrize("flag", [(), ("--check",)], ids=["apply", "check"])
@pytest.mark.parametrize(
    "arrange, code, naming",
    [
        (remove(INFO), 3, ["not a Megatron-LM checkout"]),
        (
            write(INFO, package_info("1.2.9")),
            3,
            ["is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.2.4"],
        ),
        (write(A, "dirty\n"), 4, [f"{A} differs from the lock"]),
        (write(REPLACED, "dirty\n"), 4, [f"{REPLACED} differs from the lock"]),
        (lambda w: write_tree(w.checkout, {A: "x", f"{SUB}/b.py": "x"}), 4, [A, f"{SUB}/b.py"]),
        (remove(A), 4, [f"{A} is missing"]),
        (move_out(SUB), 4, [f"{SUB} is a symlink"]),
        (move_out(A), 4, [A]),
        (write(RUN, "my work\n"), 5, [RUN]),
        (make_folder(RUN), 5, [RUN]),
        (link_private_folder, 1, [STATE]),
    ],
)
def test_what_stands_in_the_way_of_apply_is_named(world, arrange, flag, code, naming):
    arrange(world)
    refused(world, code, *flag, naming=naming)


@pytest.mark.parametrize(
    "arrange, flag, code, naming",
    [
        (lambda w: shutil.rmtree(w.checkout / STATE), (), 4, ["its original is lost"]),
        (write(A, "my work\n"), (), 5, [A]),
        (write(A, "my work\n"), ("--revert",), 5, [A]),
        (write(RUN, "my work\n"), (), 5, [RUN]),
        (write(RUN, "my work\n"), ("--revert",), 5, [RUN]),
        (move_out("examples"), ("--revert",), 4, ["examples is a symlink"]),
        (write(f"{STATE}/applied.json", '{"files": 1}'), (), 1, ["applied.json is damaged"]),
        (write(f"{STATE}/applied.json", "{"), ("--revert",), 1, ["applied.json is damaged"]),
    ],
)
def test_what_was_done_to_an_applied_checkout_is_named(world, arrange, flag, code, naming):
    world.apply()
    arrange(world)
    if not flag and code == 5:
        world.edit_patch_set()
    refused(world, code, *flag, naming=naming)


@pytest.mark.parametrize("link", ["run.py", "folder"])
def test_a_symlink_among_the_overlay_files_is_refused(world, link):
    path = world.root / "examples/mimo" / link
    path.unlink(missing_ok=True)
    path.symlink_to("/etc")
    refused(world, 1, naming=[f"examples/mimo/{link} is a symlink"])


def test_an_overlay_file_cannot_land_in_a_private_folder(world):
    (world.root / "megatron_overlay/.git").mkdir()
    (world.root / "megatron_overlay/.git/config").write_text("x")
    refused(world, 1, naming=[".git/config"])


@pytest.mark.parametrize("path", ["../outside.txt", "/etc/hostname", "megatron/../../outside.txt"])
def test_a_lock_that_names_a_path_outside_is_refused(world, path):
    lock = world.root / "patches/upstream.toml"
    entry = f'[files."{path}"]\nbefore = "{sha256(b"secret")}"\nafter = "0"\nby = ["overlay"]\n'
    lock.write_text(lock.read_text() + entry)
    refused(world, 1, naming=["leaves the checkout"])


@pytest.mark.parametrize(
    "diff",
    [
        ESCAPE.format("../outside.txt"),
        ESCAPE.format("../../../outside.txt"),
        ESCAPE.format("megatron/../../outside.txt"),
        NEW_LINK + ESCAPE.format("megatron/evil/outside.txt"),
    ],
)
def test_a_patch_that_leaves_the_checkout_is_refused(world, diff):
    """Apply itself refuses it too, where somebody made the lock fit the patch."""
    (world.base / "outside.txt").write_text("secret\n")
    (world.base / "outside").mkdir()
    (world.base / "outside/outside.txt").write_text("secret\n")
    patch = world.patch("0000-evil", diff)
    assert world.run("refresh").code == 1
    lock = world.root / "patches/upstream.toml"
    line = f'"0000-evil.patch" = "{sha256(patch.read_bytes())}"'
    lock.write_text(lock.read_text().replace("[patches]", f"[patches]\n{line}"))
    before = snapshot(world.base)
    result = world.apply()
    assert (result.code, len(result.errors)) == (1, 1)
    world.apply("--revert")
    assert snapshot(world.base) == before


def test_a_manifest_that_names_a_path_outside_is_refused(world):
    world.apply()
    victim = world.base / "victim"
    victim.write_text("precious")
    manifest = world.checkout / STATE / "applied.json"
    table = json.loads(manifest.read_text())
    table["files"]["../victim"] = [None, f"644 {sha256(b'precious')}"]
    manifest.write_text(json.dumps(table))
    refused(world, 1, "--revert", naming=["'../victim'"])


def test_a_damaged_original_is_not_put_back(world):
    world.apply()
    for blob in (world.checkout / STATE / "originals").iterdir():
        blob.write_text("damaged")
    before = world.files()
    assert world.apply("--revert").errors[0].endswith("is missing or damaged: fetch anew")
    assert world.files() == before


def test_a_patch_set_edited_after_its_lock_is_refused(world):
    world.patch("0001-first", edit("megatron/core/a.py", "a_3", "another"), HEADER)
    refused(world, 1, naming=["patches/0001-first.patch differs from the lock: run `make lock`"])


@pytest.mark.parametrize("flags", [[], ["--revert"]])
def test_a_step_that_the_machine_refuses_leaves_the_checkout_as_it_was(world, flags, monkeypatch):
    if flags:
        world.apply()
    before, replace, refusals = snapshot(world.checkout), os.replace, []

    def refuse_once(source, target):
        if Path(target).name == "b.py" and not refusals:
            refusals.append(PermissionError(errno.EACCES, "Permission denied", str(target)))
            raise refusals[0]
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_once)
    result = world.apply(*flags)
    path = f"{world.checkout}/megatron/core/sub/b.py"
    assert result.code == 1
    assert result.errors == [f"error: {path}: Permission denied: the checkout is as before"]
    assert snapshot(world.checkout) == before


def test_a_second_run_at_the_same_time_is_refused(world):
    descriptor = os.open(world.checkout, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused(world, 1, naming=["another run is at work"])
    finally:
        os.close(descriptor)
