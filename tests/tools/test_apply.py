# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Applying and reverting: files land, files come back, and none moves without need."""

import os
import shutil
from pathlib import Path

import pytest

import mini
from mini import MODULE, REPLACED, RUN, SCRIPT, A, B, numbered, snapshot, write_tree

OURS = {REPLACED: "ours_instead\n", MODULE: "new_module\n", RUN: "run\n"}
A_APPLIED = numbered("a", {3: "A_three", 10: "a_10\nA_ten_and_a_half"})
SCRIPT_APPLIED = {SCRIPT: numbered("s", {3: "S_three"})}
APPLIED = OURS | SCRIPT_APPLIED | {A: A_APPLIED, B: numbered("b", {3: "B_three"})}
LATER_APPLIED = mini.LATER_UPSTREAM | OURS | SCRIPT_APPLIED
LATER_APPLIED[A] = "a_0\n" + A_APPLIED.replace("a_10\n", "a_ten\n")


def identities(root: Path) -> dict:
    stats = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return {path: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}


@pytest.mark.parametrize(
    "tree, flags, expected",
    [
        (mini.CLONE, (), APPLIED),
        (mini.CLONE, ("--link",), APPLIED),
        (mini.LATER_UPSTREAM, (), LATER_APPLIED),
    ],
    ids=["clone", "link", "later"],
)
def test_apply_changes_what_is_ours_and_revert_gives_every_byte_back(world, tree, flags, expected):
    """An sdist is in test_real_pin.py."""
    world.as_tree(tree)
    (world.checkout / A).chmod(0o755)
    original = snapshot(world.checkout)
    assert world.apply("--check").out[0].startswith("would change")
    assert world.apply("--status").out == world.apply("--revert").out == ["not applied"]
    assert snapshot(world.checkout) == original
    assert len(world.apply(*flags).out) == 1
    assert {path: world.text(path) for path in expected} == expected
    assert os.access(world.checkout / RUN, os.X_OK) and os.access(world.checkout / A, os.X_OK)
    links = {p for p, (_, to) in world.files().items() if isinstance(to, str)}
    assert links == (OURS.keys() if flags else set())
    before = identities(world.checkout)
    assert world.apply().out == ["already applied"]  # links stay links
    assert world.apply("--status").out[0].startswith("applied: ")
    assert identities(world.checkout) == before
    bytecode = "megatron/core/new/deep/__pycache__/module.cpython-311.pyc"
    write_tree(world.checkout, {bytecode: "x", "examples/mimo/note.txt": "mine"})
    assert world.apply("--revert").code == 0
    assert world.text("examples/mimo/note.txt") == "mine"
    shutil.rmtree(world.checkout / "examples/mimo")
    assert snapshot(world.checkout) == original


def test_a_later_state_of_the_patch_set_starts_from_the_originals(world):
    original = snapshot(world.checkout)
    world.apply()
    world.edit_patch_set()
    before = snapshot(world.checkout)
    assert world.apply("--check").out[0] == "would change 5 files"
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
    attributes = {".gitattributes": "*.py -diff -merge\n"}
    world.as_tree(mini.CLONE | attributes, mini.make_repository)
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
