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

from mini import STATE, UPSTREAM, World, edit, git, numbered, package_info, snapshot, write_tree
from overlay.checkout import sha256

A, SUB, REPLACED = "megatron/core/a.py", "megatron/core/sub", "megatron/core/replaced.py"
B, RUN, MODULE = f"{SUB}/b.py", "examples/mimo/run.py", "megatron/core/new/deep/module.py"
INFO, JOURNAL = "megatron/core/package_info.py", f"{STATE}/applied.json"
DIFFERS = "differs from the lock, as git diff shows: restore it or fetch anew"
APPLIED = {
    A: numbered("a", {3: "A_three", 10: "a_10\nA_ten_and_a_half"}),
    B: numbered("b", {3: "B_three"}),
    REPLACED: "ours_instead\n",
    MODULE: "new_module\n",
    RUN: "run\n",
}
LATER = {A: numbered("a", {3: "A_three"}), B: numbered("b", {3: "B3"}), REPLACED: "ours, later\n"}


def identities(root: Path) -> dict:
    stats = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return {path: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}


@pytest.mark.parametrize("flags", [(), ("--link",)], ids=["copy", "link"])
def test_apply_changes_what_is_ours_and_revert_gives_every_byte_back(world, flags):
    (world.checkout / A).chmod(0o755)
    original = snapshot(world.checkout)
    assert world.apply(*flags).out == ["applied: 5 files changed"]
    assert {path: world.text(path) for path in APPLIED} == APPLIED
    assert os.access(world.checkout / RUN, os.X_OK) and os.access(world.checkout / A, os.X_OK)
    links = {path for path in APPLIED if (world.checkout / path).is_symlink()}
    assert links == ({REPLACED, MODULE, RUN} if flags else set())
    if flags:
        ours = world.root / "megatron_overlay" / MODULE
        assert (world.checkout / MODULE).resolve() == ours
    before = identities(world.checkout)
    time.sleep(0.02)
    assert world.apply().out == ["already applied"]  # links stay links
    assert identities(world.checkout) == before
    bytecode = "megatron/core/new/deep/__pycache__/module.cpython-311.pyc"
    write_tree(world.checkout, {bytecode: "x", "examples/mimo/note.txt": "mine"})
    assert world.apply("--revert").code == 0
    assert world.text("examples/mimo/note.txt") == "mine"
    shutil.rmtree(world.checkout / "examples")
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
        assert (B in result.out) == (len(result.out) > 1)
        assert snapshot(world.checkout) == before
    outdated = "applied: an earlier state of the patch set; apply again to update"
    assert world.apply("--status").out == [outdated]
    assert world.apply().out == ["updated: 5 files changed"]
    assert {path: world.text(path) for path in LATER} == LATER
    assert not (world.checkout / "megatron/core/new").exists()
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
    assert status(text="edited\n") == ["not applied", f"{A} {DIFFERS}"]
    assert status(text=APPLIED[A])[1].startswith(f"{A} is patched already, but its original is")
    assert status(text=UPSTREAM[A]) == ["not applied"]
    world.apply()
    applied = world.files()
    assert status() == ["applied: 5 files"]
    assert status(text="edited\n") == ["modified since", A]
    (world.checkout / RUN).unlink()
    assert status(text=UPSTREAM[A]) == ["partly applied: apply again to repair", RUN, A]
    assert world.apply().code == 0
    assert world.files() == applied


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
    worktree = world.base / "worktree"
    git(world.checkout, "worktree", "add", "--detach", str(worktree))
    (worktree / RUN).write_text("edited\n")
    assert (result := world.run("apply", worktree)).code == 5 and RUN in result.errors[0]
    git(worktree, "checkout", RUN)
    before = snapshot(world.checkout)
    assert world.run("apply", worktree).code == 0
    assert snapshot(world.checkout) == before
    assert (worktree / RUN).read_text() == APPLIED[RUN]  # the committed file is replaced
    status = git(worktree, "status", "--porcelain")
    assert A in status and STATE not in status
    assert world.run("apply", worktree, "--revert").code == 0
    assert git(worktree, "status", "--porcelain", "--ignored") == ""


# What stands in the way: each row arranges it, on a pristine or an applied checkout


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


def link_ours(name: str):
    def arrange(world: World) -> None:
        (world.root / "examples/mimo" / name).unlink(missing_ok=True)
        (world.root / "examples/mimo" / name).symlink_to("/etc")

    return arrange


def lock_path(path: str):
    entry = f'"{path}" = ["{sha256(b"secret")}", "0"]\n'
    return lambda world: world.edit_lock(lambda text: text + entry)


def put_outside(world: World) -> None:
    """Let the journal name a file outside the checkout."""
    (world.base / "victim").write_text("precious")
    table = json.loads(world.text(JOURNAL)) | {"../victim": [None, None, [sha256(b"precious")]]}
    (world.checkout / JOURNAL).write_text(json.dumps(table))


NEW_LINK = (
    "diff --git a/megatron/evil b/megatron/evil\nnew file mode 120000\n"
    "--- /dev/null\n+++ b/megatron/evil\n@@ -0,0 +1 @@\n+../../outside\n"
    "\\ No newline at end of file\n"
)


def escape(path: str, before: str = ""):
    """Add a patch that leaves the checkout, to the lock too."""

    def arrange(world: World) -> None:
        write_tree(world.base, {"outside.txt": "secret\n", "outside/outside.txt": "secret\n"})
        names = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
        patch = world.patch("0000-evil", before + names + "@@ -1,1 +1,1 @@\n-secret\n+stolen\n")
        assert world.run("refresh").code == 1
        line = f'"0000-evil.patch" = "{sha256(patch.read_bytes())}"'
        world.edit_lock(lambda text: text.replace("\n[patches]", f"\n[patches]\n{line}"))

    return arrange


PRISTINE = [
    (remove(INFO), 3, "not a Megatron-LM checkout"),
    (write(INFO, package_info("1.2.9")), 3,
     "is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.2.4"),
    (write(A, "dirty\n"), 4, f"{A} {DIFFERS}"),
    (write(REPLACED, "dirty\n"), 4, f"{REPLACED} differs from the lock"),
    (lambda w: write_tree(w.checkout, {A: "x", B: "x"}), 4, f"{A} + {B}"),
    (remove(A), 4, f"{A} is missing"),
    (link_out(SUB), 4, f"{SUB} is a symlink"),
    (link_out(A), 4, A),
    (write(RUN, "my work\n"), 5, RUN),
    (lambda w: (w.checkout / RUN).mkdir(parents=True), 5, RUN),
    (link_out(STATE), 1, STATE),
    # a patch set that is not in order
    (link_ours("run.py"), 1, "examples/mimo/run.py is a symlink"),
    (link_ours("folder"), 1, "examples/mimo/folder is a symlink"),
    (lambda w: write_tree(w.root, {"megatron_overlay/.git/config": "x"}), 1, ".git/config"),
    (lock_path("/etc/hostname"), 1, "leaves the checkout"),
    (lock_path("megatron/../../outside.txt"), 1, "leaves the checkout"),
    (lambda w: w.patch("0001-first", edit(A, "a_3", "x") + edit(B, "b_3", "x")), 1,
     "patches/0001-first.patch differs from the lock: run `make lock`"),
    (lambda w: (w.root / "megatron_overlay" / REPLACED).write_text("edited\n"), 1,
     f"{REPLACED} differs from the lock: run `make lock`"),
    (escape("megatron/../../outside.txt"), 1, "0000-evil"),
    (escape("megatron/evil/outside.txt", NEW_LINK), 1, "0000-evil"),
]  # fmt: skip
APPLIED_ALREADY = [
    (lambda w: shutil.rmtree(w.checkout / STATE), [], 4, "its original is lost"),
    *((write(path, "my work\n"), flags, 5, f"{path} was edited + delete the file")
      for path in (A, RUN) for flags in ([], ["--revert"])),
    (link_out("examples"), ["--revert"], 4, "examples is a symlink"),
    (write(JOURNAL, '{"files": 1}'), [], 1, "applied.json is damaged"),
    (write(JOURNAL, "{"), ["--revert"], 1, "applied.json is damaged"),
    (put_outside, ["--revert"], 1, "'../victim'"),
]  # fmt: skip


@pytest.mark.parametrize(
    "applied, arrange, flags, code, naming",
    [
        *((False, arrange, flags, code, naming)
          for arrange, code, naming in PRISTINE for flags in ([], ["--check"])),
        *((True, *row) for row in APPLIED_ALREADY),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_is_named_and_nothing_changes(
    world, applied, arrange, flags, code, naming
):
    if applied:
        world.apply()
    arrange(world)
    if applied and not flags and code == 5:
        world.edit_patch_set()
    before = snapshot(world.base)
    result = world.apply(*flags)
    assert result.code == code, result
    assert result.errors and all(line.startswith("error: ") for line in result.errors)
    assert all(part in "\n".join(result.errors) for part in naming.split(" + ")), result.errors
    assert snapshot(world.base) == before


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
    what = f"error: {world.checkout / B}: Permission denied: the checkout is as before"
    assert (result.code, result.errors) == (1, [what])
    assert snapshot(world.checkout) == before


def test_usage_errors_and_a_second_run_at_the_same_time_are_refused_in_one_line(world):
    for args in ((), ("x", "--check", "--revert"), ("x", "--no-such")):
        result = world.run("apply", *args)
        assert (result.code, len(result.errors)) == (2, 1)
    descriptor = os.open(world.checkout, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    result = world.apply()
    assert (result.code, len(result.errors)) == (1, 1)
    assert "another run is at work" in result.errors[0]
    os.close(descriptor)
