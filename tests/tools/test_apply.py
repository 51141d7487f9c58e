# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Applying and reverting: files land, files come back, none moves without need, and what stands in
the way is named before anything changes."""

import json
import os
import shutil
from pathlib import Path

import pytest

import mini
from mini import MODULE, REPLACED, RUN, SCRIPT, A, B, World, edit, numbered, snapshot, write_tree
from overlay.checkout import sha256

JOURNAL = f"{mini.STATE}/applied.json"
DIFFERS = "differs from the lock, as git diff shows: restore it or fetch anew"
LEFT_OUT = f"left out: 0009-script.patch: only git checkouts have {SCRIPT}"
OURS = {REPLACED: "ours_instead\n", MODULE: "new_module\n", RUN: "run\n"}
A_APPLIED = numbered("a", {3: "A_three", 10: "a_10\nA_ten_and_a_half"})
APPLIED = OURS | {A: A_APPLIED, B: numbered("b", {3: "B_three"})}
SCRIPT_APPLIED = {SCRIPT: numbered("s", {3: "S_three"})}
LATER_APPLIED = mini.LATER_UPSTREAM | OURS | SCRIPT_APPLIED
LATER_APPLIED[A] = "a_0\n" + A_APPLIED.replace("a_10\n", "a_ten\n")


def identities(root: Path) -> dict:
    stats = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return {path: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}


@pytest.mark.parametrize(
    "tree, flags, expected, notices",
    [
        (mini.CLONE, (), APPLIED | SCRIPT_APPLIED, []),
        (mini.CLONE, ("--link",), APPLIED | SCRIPT_APPLIED, []),
        (mini.UPSTREAM, (), APPLIED, [LEFT_OUT]),
        (mini.SECOND_UPSTREAM, (), APPLIED | {A: "a_0\n" + A_APPLIED}, [LEFT_OUT]),
        (mini.LATER_UPSTREAM, (), LATER_APPLIED, []),
    ],
    ids=["clone", "link", "sdist", "second", "later"],
)
def test_apply_changes_what_is_ours_and_revert_gives_every_byte_back(
    world, tree, flags, expected, notices
):
    world.as_tree(tree)
    (world.checkout / A).chmod(0o755)
    original = snapshot(world.checkout)
    assert world.apply("--check").out[0].startswith("would change")
    assert world.apply("--status").out == world.apply("--revert").out + notices
    assert snapshot(world.checkout) == original
    assert world.apply(*flags).out[1:] == notices
    assert {path: world.text(path) for path in expected} == expected
    assert os.access(world.checkout / RUN, os.X_OK) and os.access(world.checkout / A, os.X_OK)
    links = {p for p, (_, to) in world.files().items() if isinstance(to, str)}
    assert links == (OURS.keys() if flags else set())
    before = identities(world.checkout)
    assert world.apply().out == ["already applied", *notices]  # links stay links
    assert world.apply("--status").out[0].startswith("applied: ")
    assert identities(world.checkout) == before
    bytecode = "megatron/core/new/deep/__pycache__/module.cpython-311.pyc"
    write_tree(world.checkout, {bytecode: "x", "examples/mimo/note.txt": "mine"})
    assert world.apply("--revert").code == 0
    assert world.text("examples/mimo/note.txt") == "mine"
    shutil.rmtree(world.checkout / "examples/mimo")
    if tree in (mini.UPSTREAM, mini.SECOND_UPSTREAM):
        (world.checkout / "examples").rmdir()
    assert snapshot(world.checkout) == original


def test_a_later_state_of_the_patch_set_starts_from_the_originals(world):
    original = snapshot(world.checkout)
    world.apply()
    world.edit_patch_set()
    before = snapshot(world.checkout)
    assert world.apply("--check").out[0] == "would change 5 files"
    outdated = "applied: an earlier state of the patch set; apply again to update"
    assert world.apply("--status").out == [outdated]
    assert snapshot(world.checkout) == before
    assert world.apply().out == ["updated: 5 files changed"]
    assert world.text(A) == numbered("a", {3: "A_three"})
    assert world.text(B) == numbered("b", {3: "B3"})
    assert world.text(REPLACED) == "ours, later\n"
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

    assert status() == ["not applied"]
    assert status(text="edited\n") == ["not applied", f"{A} {DIFFERS}"]
    assert status(text=mini.UPSTREAM[A]) == ["not applied"]
    world.apply()
    applied = world.files()
    assert status() == ["applied: 6 files"]
    assert status(text="edited\n") == ["modified since", A]
    (world.checkout / RUN).unlink()
    assert status(text=mini.UPSTREAM[A]) == ["partly applied: apply again to repair", RUN, A]
    assert world.apply().code == 0
    assert world.files() == applied


def test_git_sees_no_private_folder_and_its_configuration_changes_nothing(world, monkeypatch):
    config = "[core]\nautocrlf = true\n[diff]\nnoprefix = true\n[apply]\nwhitespace = error\n"
    files = {".gitconfig": config, ".config/git/attributes": "* -diff\n*.py text eol=crlf\n"}
    home = write_tree(world.base / "home", files)
    world.as_git(mini.CLONE | {".gitattributes": "*.py -diff -merge\n"})
    for name, value in {"HOME": home, "GIT_DIFF_OPTS": "-U0"}.items():
        monkeypatch.setenv(name, str(value))
    assert world.lock().out == ["patches and lock are up to date"]
    assert world.apply().code == 0
    assert (world.checkout / A).read_bytes() == APPLIED[A].encode()
    assert world.run("refresh", world.checkout).out[-1] == "patches and lock are up to date"
    status = mini.git(world.checkout, "status", "--porcelain")
    assert A in status and mini.STATE not in status
    assert world.apply("--revert").code == 0
    assert mini.git(world.checkout, "status", "--porcelain", "--ignored") == ""


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


def lock_path(path: str):
    entry = f'"{path}" = ["{sha256(b"secret")}", "0"]\n'
    return lambda world: world.edit_lock(lambda text: text + entry)


def put_outside(world: World) -> None:
    """Let the journal name a file outside the checkout."""
    (world.base / "victim").write_text("precious")
    table = json.loads(world.text(JOURNAL)) | {"../victim": [None, None, [sha256(b"precious")]]}
    (world.checkout / JOURNAL).write_text(json.dumps(table))


def escape(path: str, before: str = ""):
    """Add a patch that leaves the checkout."""

    def arrange(world: World) -> None:
        write_tree(world.base, {"outside.txt": "s_3\n", "outside/outside.txt": "s_3\n"})
        world.patch("0000-evil", before + edit(path, "s_3", "stolen"))

    return arrange


NEW_LINK = (
    "diff --git a/megatron/evil b/megatron/evil\nnew file mode 120000\n"
    "--- /dev/null\n+++ b/megatron/evil\n@@ -0,0 +1 @@\n+../../outside\n"
    "\\ No newline at end of file\n"
)
PRISTINE = [
    (remove(mini.INFO), 3, "not a Megatron-LM checkout"),
    (write(mini.INFO, mini.package_info("1.2.9")), 3,
     "is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.2.4 or 1.3.0"),
    (lambda w: write_tree(w.checkout, {A: "x", B: "x"}), 4, f"{A} {DIFFERS} + {B}"),
    (write(A, APPLIED[A]), 4, "its original is lost"),
    (write(REPLACED, "dirty\n"), 4, f"{REPLACED} differs from the lock"),
    (write(SCRIPT, "dirty\n"), 4, f"{SCRIPT} differs from the lock"),
    (remove(A), 4, f"{A} is missing"),
    (link_out("megatron/core/sub"), 4, "megatron/core/sub is a symlink"),
    (link_out(A), 4, A),
    (write(RUN, "my work\n"), 5, RUN),
    (lambda w: (w.checkout / RUN).mkdir(parents=True), 5, RUN),
    (link_out(mini.STATE), 1, mini.STATE),
    # a patch set that is not in order
    (lambda w: (w.root / "examples/mimo/x").symlink_to("/etc"), 1, "examples/mimo/x is a symlink"),
    (lambda w: write_tree(w.root, {"megatron_overlay/.git/config": "x"}), 1, ".git/config"),
    (lock_path("/etc/hostname"), 1, "leaves the checkout"),
    (lock_path("megatron/../../outside.txt"), 1, "leaves the checkout"),
    (lambda w: w.patch("0001-first", edit(A, "a_3", "x") + edit(B, "b_3", "x")), 1,
     f"{A} differs from the lock: run `make lock` + {B}"),
    (lambda w: (w.root / "megatron_overlay" / REPLACED).write_text("edited\n"), 1,
     f"{REPLACED} differs from the lock: run `make lock`"),
    (escape("megatron/../../outside.txt"), 1, "0000-evil"),
    (escape("megatron/evil/outside.txt", NEW_LINK), 1, "0000-evil"),
]  # fmt: skip
APPLIED_ALREADY = [
    (lambda w: shutil.rmtree(w.checkout / mini.STATE), [], 4, "its original is lost"),
    *((write(path, "my work\n"), flags, 5, f"{path} was edited + delete the file")
      for path in (A, RUN) for flags in ([], ["--revert"])),
    (link_out("examples"), ["--revert"], 4, "examples is a symlink"),
    (write(JOURNAL, '{"files": 1}'), [], 1, "applied.json is damaged"),
    (write(JOURNAL, "{"), ["--revert"], 1, "applied.json is damaged"),
    (put_outside, ["--revert"], 1, "'../victim'"),
]  # fmt: skip
ROWS = [(False, arrange, flags, code, naming)
        for arrange, code, naming in PRISTINE for flags in ([], ["--check"])]  # fmt: skip


@pytest.mark.parametrize(
    "applied, arrange, flags, code, naming", [*ROWS, *((True, *row) for row in APPLIED_ALREADY)]
)
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


def test_usage_errors_are_refused_in_one_line(world):
    for args in ((), ("x", "--check", "--revert"), ("x", "--no-such")):
        result = world.run("apply", *args)
        assert (result.code, len(result.errors)) == (2, 1)
