# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Applying and reverting: files land, files come back, none moves without need, and what stands in
the way is named before anything changes."""

import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from mini import (
    PIN,
    STATE,
    UPSTREAM,
    World,
    edit,
    git,
    numbered,
    package_info,
    snapshot,
    write_tree,
)
from overlay.checkout import sha256

A, SUB, REPLACED = "megatron/core/a.py", "megatron/core/sub", "megatron/core/replaced.py"
RUN, MODULE = "examples/mimo/run.py", "megatron/core/new/deep/module.py"
INFO, MANIFEST = "megatron/core/package_info.py", f"{STATE}/applied.json"
APPLIED = {
    A: numbered("a", {3: "A_three", 10: "a_10\nA_ten_and_a_half"}),
    f"{SUB}/b.py": numbered("b", {3: "B_three"}),
    REPLACED: "ours_instead\n",
    MODULE: "new_module\n",
    RUN: "run\n",
}
LATER = {A: numbered("a", {3: "A_three"}), f"{SUB}/b.py": numbered("b", {3: "B3"})}


@pytest.mark.parametrize("flags", [(), ("--link",)], ids=["copy", "link"])
def test_apply_changes_what_is_ours_and_revert_gives_every_byte_back(world, flags):
    (world.checkout / A).chmod(0o755)
    original = snapshot(world.checkout)
    assert world.apply(*flags).out == ["applied: 5 files changed"]
    assert {path: world.text(path) for path in APPLIED} == APPLIED
    assert os.access(world.checkout / RUN, os.X_OK) and os.access(world.checkout / A, os.X_OK)
    links = {path: (world.checkout / path).is_symlink() for path in APPLIED}
    assert links == {path: bool(flags) and path in (REPLACED, MODULE, RUN) for path in APPLIED}
    if flags:
        ours = world.root / "megatron_overlay" / MODULE
        assert (world.checkout / MODULE).resolve() == ours

    def identities():
        stats = {path: path.lstat() for path in (world.checkout, *world.checkout.rglob("*"))}
        return {path: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}

    before = identities()
    time.sleep(0.02)
    assert world.apply().out == ["already applied"]  # links stay links
    assert identities() == before
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


def test_a_later_state_of_the_patch_set_starts_from_the_originals(world):
    original = snapshot(world.checkout)
    for prepare, first in (
        (lambda: None, "would change 5 files"),
        (world.apply, "already applied"),
        (world.edit_patch_set, "would change 5 files"),
    ):
        prepare()
        before = snapshot(world.checkout)
        result = world.apply("--check")
        assert (result.code, result.out[0]) == (0, first)
        assert (f"{SUB}/b.py" in result.out) == (len(result.out) > 1)
        assert snapshot(world.checkout) == before
    outdated = "applied: an earlier state of the patch set; apply again to update"
    assert world.apply("--status").out == [outdated]
    assert world.apply().out == ["updated: 5 files changed"]
    assert {path: world.text(path) for path in LATER} == LATER
    assert world.text(REPLACED) == "ours, later\n"
    assert not (world.checkout / "megatron/core/new").exists()
    kept = {path.name for path in (world.checkout / STATE / "originals").iterdir()}
    assert kept == {sha256(UPSTREAM[path].encode()) for path in (A, f"{SUB}/b.py", REPLACED)}
    world.apply("--revert")
    assert snapshot(world.checkout) == original


def test_status_names_the_state_and_the_files_and_apply_repairs(world):
    def status(path: str = A, text: str | None = None) -> list[str]:
        if text is not None:
            (world.checkout / path).write_text(text)
        result = world.apply("--status")
        assert result.code == 0
        return result.out

    assert status() == world.apply("--revert").out == ["not applied"]
    assert status(text="edited\n") == ["not applied: files differ from the lock", A]
    assert status(text=APPLIED[A])[0].startswith("partly applied: patched files without")
    assert status(text=UPSTREAM[A]) == ["not applied"]
    world.apply()
    applied = world.files()
    assert status() == ["applied: 5 files"]
    assert status(text="edited\n") == ["modified since", A]
    (world.checkout / RUN).unlink()
    assert status(text=UPSTREAM[A]) == ["partly applied: apply again to repair", RUN, A]
    assert world.apply().code == 0
    assert world.files() == applied


def test_revert_removes_bytecode_but_no_foreign_file_from_our_folders(world):
    original = snapshot(world.checkout)
    world.apply()
    bytecode = "megatron/core/new/deep/__pycache__/module.cpython-311.pyc"
    write_tree(world.checkout, {bytecode: "x", "examples/mimo/note.txt": "mine"})
    world.apply("--revert")
    assert world.text("examples/mimo/note.txt") == "mine"
    shutil.rmtree(world.checkout / "examples")
    assert snapshot(world.checkout) == original


def test_the_configuration_of_git_on_the_machine_changes_nothing(world, monkeypatch):
    config = "[core]\nautocrlf = true\n[diff]\nnoprefix = true\n[apply]\nwhitespace = error\n"
    files = {".gitconfig": config, ".config/git/attributes": "* -diff\n*.py text eol=crlf\n"}
    home = write_tree(world.base / "home", files)
    for name, value in {"HOME": home, "GIT_DIR": "/no/such", "GIT_DIFF_OPTS": "-U0"}.items():
        monkeypatch.setenv(name, str(value))
    write_tree(world.checkout, {".gitattributes": "* text eol=crlf\n*.py -diff -merge\n"})
    assert world.lock().out == ["patches and lock are up to date"]
    assert world.apply().code == 0
    assert (world.checkout / A).read_bytes() == APPLIED[A].encode()
    assert world.run("refresh", world.checkout).out[-1] == "patches and lock are up to date"


def test_in_a_git_worktree_git_sees_no_private_folder_and_revert_leaves_it_clean(world):
    world.as_git(UPSTREAM | {RUN: "upstream's own\n", ".gitignore": "build\n"})
    git(world.checkout, "tag", f"v{PIN}")
    worktree = world.base / "worktree"
    git(world.checkout, "worktree", "add", "--detach", str(worktree))
    (worktree / RUN).write_text("edited\n")
    assert (result := world.run("apply", worktree)).code == 5 and RUN in result.errors[0]
    git(worktree, "checkout", RUN)
    before = snapshot(world.checkout)
    assert world.run("apply", worktree).code == 0
    assert snapshot(world.checkout) == before
    assert (worktree / RUN).read_text() == APPLIED[RUN]  # the version's file is replaced
    status = git(worktree, "status", "--porcelain")
    assert A in status and STATE not in status
    assert world.run("apply", worktree, "--revert").code == 0
    assert git(worktree, "status", "--porcelain", "--ignored") == ""


# What stands in the way


def refused(world: World, code: int, *flags: str, naming: str) -> None:
    """Run apply; it must fail with ``code``, print error lines only, and change nothing."""
    before = snapshot(world.base)
    result = world.apply(*flags)
    assert result.code == code, result
    assert result.errors and all(line.startswith("error: ") for line in result.errors)
    assert all(part in "\n".join(result.errors) for part in naming.split(" + ")), result.errors
    assert snapshot(world.base) == before


@pytest.mark.parametrize("args", [(), ("x", "--check", "--revert"), ("x", "--no-such")])
def test_usage_errors_exit_2_in_one_line(world, args):
    result = world.run("apply", *args)
    assert (result.code, len(result.errors)) == (2, 1)


def write(path: str, text: str):
    return lambda world: write_tree(world.checkout, {path: text})


def remove(path: str):
    return lambda world: (world.checkout / path).unlink()


def link_out(path: str):
    """Put a symlink at a path, to where its content went, outside the checkout."""

    def arrange(world: World) -> None:
        outside = world.base / "outside"
        if (world.checkout / path).exists():
            shutil.move(world.checkout / path, outside)
        else:
            outside.mkdir()
        (world.checkout / path).symlink_to(outside)

    return arrange


@pytest.mark.parametrize("flags", [(), ("--check",)], ids=["apply", "check"])
@pytest.mark.parametrize(
    "arrange, code, naming",
    [
        (remove(INFO), 3, "not a Megatron-LM checkout"),
        (write(INFO, package_info("1.2.9")), 3,
         "is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.2.4"),
        (write(A, "dirty\n"), 4, f"{A} differs from the lock"),
        (write(REPLACED, "dirty\n"), 4, f"{REPLACED} differs from the lock"),
        (lambda w: write_tree(w.checkout, {A: "x", f"{SUB}/b.py": "x"}), 4, f"{A} + {SUB}/b.py"),
        (remove(A), 4, f"{A} is missing"),
        (link_out(SUB), 4, f"{SUB} is a symlink"),
        (link_out(A), 4, A),
        (write(RUN, "my work\n"), 5, RUN),
        (lambda w: (w.checkout / RUN).mkdir(parents=True), 5, RUN),
        (link_out(STATE), 1, STATE),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_of_apply_is_named(world, arrange, flags, code, naming):
    arrange(world)
    refused(world, code, *flags, naming=naming)


def put_outside(world: World) -> None:
    """Let the manifest name a file outside the checkout."""
    (world.base / "victim").write_text("precious")
    table = json.loads(world.text(MANIFEST))
    table["files"]["../victim"] = [None, f"644 {sha256(b'precious')}"]
    (world.checkout / MANIFEST).write_text(json.dumps(table))


def damage_originals(world: World) -> None:
    for blob in (world.checkout / STATE / "originals").iterdir():
        blob.write_text("damaged")


@pytest.mark.parametrize(
    "arrange, flags, code, naming",
    [
        (lambda w: shutil.rmtree(w.checkout / STATE), (), 4, "its original is lost"),
        *((write(path, "my work\n"), flags, 5, path)
          for path in (A, RUN) for flags in ((), ("--revert",))),
        (link_out("examples"), ("--revert",), 4, "examples is a symlink"),
        (write(MANIFEST, '{"files": 1}'), (), 1, "applied.json is damaged"),
        (write(MANIFEST, "{"), ("--revert",), 1, "applied.json is damaged"),
        (put_outside, ("--revert",), 1, "'../victim'"),
        (damage_originals, ("--revert",), 1, "is missing or damaged: fetch anew"),
    ],
)  # fmt: skip
def test_what_was_done_to_an_applied_checkout_is_named(world, arrange, flags, code, naming):
    world.apply()
    arrange(world)
    if not flags and code == 5:
        world.edit_patch_set()
    refused(world, code, *flags, naming=naming)


def link_ours(name: str):
    def arrange(world: World) -> None:
        (world.root / "examples/mimo" / name).unlink(missing_ok=True)
        (world.root / "examples/mimo" / name).symlink_to("/etc")

    return arrange


def lock_path(path: str):
    entry = f'[files."{path}"]\nbefore = "{sha256(b"secret")}"\nafter = "0"\nby = ["overlay"]\n'
    return lambda world: world.edit_lock(lambda text: text + entry)


@pytest.mark.parametrize(
    "arrange, naming",
    [
        (link_ours("run.py"), "examples/mimo/run.py is a symlink"),
        (link_ours("folder"), "examples/mimo/folder is a symlink"),
        (lambda w: write_tree(w.root, {"megatron_overlay/.git/config": "x"}), ".git/config"),
        (lock_path("../outside.txt"), "leaves the checkout"),
        (lock_path("/etc/hostname"), "leaves the checkout"),
        (lock_path("megatron/../../outside.txt"), "leaves the checkout"),
        (lambda w: w.patch("0001-first", edit(A, "a_3", "another")),
         "patches/0001-first.patch differs from the lock: run `make lock`"),
    ],
)  # fmt: skip
def test_a_patch_set_that_is_not_in_order_is_refused(world, arrange, naming):
    arrange(world)
    refused(world, 1, naming=naming)


ESCAPE = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1,1 +1,1 @@\n-secret\n+stolen\n"
NEW_LINK = (
    "diff --git a/megatron/evil b/megatron/evil\nnew file mode 120000\n"
    "--- /dev/null\n+++ b/megatron/evil\n@@ -0,0 +1 @@\n+../../outside\n"
    "\\ No newline at end of file\n"
)


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
    write_tree(world.base, {"outside.txt": "secret\n", "outside/outside.txt": "secret\n"})
    patch = world.patch("0000-evil", diff)
    assert world.run("refresh").code == 1
    line = f'"0000-evil.patch" = "{sha256(patch.read_bytes())}"'
    world.edit_lock(lambda text: text.replace("\n[patches]", f"\n[patches]\n{line}"))
    refused(world, 1, naming="0000-evil")


@pytest.mark.parametrize("flags", [[], ["--revert"]], ids=["apply", "revert"])
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
    path = f"{world.checkout}/{SUB}/b.py"
    assert (result.code, result.errors) == (
        1,
        [f"error: {path}: Permission denied: the checkout is as before"],
    )
    assert snapshot(world.checkout) == before


def test_a_second_run_at_the_same_time_is_refused(world):
    descriptor = os.open(world.checkout, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    refused(world, 1, naming="another run is at work")
    os.close(descriptor)
