# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Applying and reverting: files land, files come back, and none moves without need."""

import os
import shutil
import time

import pytest

from mini import SECOND_UPSTREAM, STATE, UPSTREAM, numbered, snapshot, write_tree

APPLIED_A = numbered("a", {3: "A_three", 10: "a_10\nA_ten_and_a_half"})


def test_apply_gives_patched_replaced_and_new_files(world):
    assert world.apply().out == ["applied: 5 files changed"]
    assert world.text("megatron/core/sub/b.py") == numbered("b", {3: "B_three"})
    assert world.text("megatron/core/a.py") == APPLIED_A
    assert world.text("megatron/core/replaced.py") == "ours_instead\n"
    assert world.text("megatron/core/new/deep/module.py") == "new_module\n"
    assert os.access(world.checkout / "examples/mimo/run.py", os.X_OK)


@pytest.mark.parametrize("flags", [(), ("--link",)])
def test_revert_gives_the_original_tree_byte_for_byte(world, flags):
    (world.checkout / "megatron/core/a.py").chmod(0o755)
    original = snapshot(world.checkout)
    world.apply(*flags)
    assert world.apply("--revert").code == 0
    assert snapshot(world.checkout) == original


@pytest.mark.parametrize("flags", [(), ("--link",)])
def test_second_apply_touches_no_file(world, flags):
    def identities():
        paths = [world.checkout, *world.checkout.rglob("*")]
        stats = {path: path.lstat() for path in paths}
        return {path: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}

    world.apply(*flags)
    before = identities()
    time.sleep(0.02)
    assert world.apply(*flags).out == ["already applied"]
    assert identities() == before


def test_link_makes_symlinks_into_the_repository(world):
    world.apply("--link")
    module = world.checkout / "megatron/core/new/deep/module.py"
    assert module.is_symlink()
    assert module.resolve() == world.root / "megatron_overlay/megatron/core/new/deep/module.py"
    assert not (world.checkout / "megatron/core/a.py").is_symlink()


def test_links_stay_links_until_a_revert(world):
    world.apply("--link")
    assert world.apply().out == ["already applied"]
    world.apply("--revert")
    world.apply()
    assert not [path for path in world.checkout.rglob("*") if path.is_symlink()]


def test_check_names_what_would_change_and_changes_nothing(world):
    for prepare, first in (
        (lambda: None, "would change 5 files"),
        (world.apply, "already applied"),
        (world.edit_patch_set, "would change 5 files"),
    ):
        prepare()
        before = snapshot(world.checkout)
        result = world.apply("--check")
        assert (result.code, result.out[0]) == (0, first)
        assert ("megatron/core/sub/b.py" in result.out) == (len(result.out) > 1)
        assert snapshot(world.checkout) == before


def test_apply_after_the_patch_set_changed_starts_from_the_originals(world):
    original = snapshot(world.checkout)
    world.apply()
    world.edit_patch_set()
    outdated = "applied: an earlier state of the patch set; apply again to update"
    assert world.apply("--status").out == [outdated]
    assert world.apply().out == ["updated: 5 files changed"]
    assert world.text("megatron/core/a.py") == numbered("a", {3: "A_three"})
    assert world.text("megatron/core/sub/b.py") == numbered("b", {3: "B3"})
    assert world.text("megatron/core/replaced.py") == "ours, later\n"
    assert not (world.checkout / "megatron/core/new").exists()
    world.apply("--revert")
    assert snapshot(world.checkout) == original


def test_apply_repairs_files_that_were_deleted_or_reset(world):
    world.apply()
    applied = world.files()
    (world.checkout / "examples/mimo/run.py").unlink()
    (world.checkout / "megatron/core/a.py").write_text(UPSTREAM["megatron/core/a.py"])
    assert world.apply("--status").out[0].startswith("partly applied")
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


def test_status_names_the_state_and_the_files(world):
    path = world.checkout / "megatron/core/a.py"

    def status():
        result = world.apply("--status")
        assert result.code == 0
        return result.out

    assert status() == ["not applied"]
    assert world.apply("--revert").out == ["not applied"]
    path.write_text("edited\n")
    assert status() == ["not applied: files differ from the lock", "megatron/core/a.py"]
    path.write_text(UPSTREAM["megatron/core/a.py"])
    world.apply()
    assert status() == ["applied: 5 files"]
    path.write_text("edited\n")
    assert status() == ["modified since", "megatron/core/a.py"]
    path.unlink()
    assert status() == ["partly applied: apply again to repair", "megatron/core/a.py"]


def test_private_folder_holds_only_originals_after_an_apply(world):
    world.apply()
    world.edit_patch_set()
    world.apply()
    names = {path.name for path in (world.checkout / STATE).iterdir()}
    assert names == {".gitignore", "originals", "applied.json"}
    assert len(list((world.checkout / STATE / "originals").iterdir())) == 3


def test_both_versions_of_the_lock_are_recognised(world):
    shutil.rmtree(world.checkout)
    write_tree(world.checkout, SECOND_UPSTREAM)
    original = snapshot(world.checkout)
    assert world.apply().out == ["applied: 5 files changed"]
    assert world.text("megatron/core/a.py") == "a_0\n" + APPLIED_A
    assert world.apply("--status").out == ["applied: 5 files"]
    world.apply("--revert")
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
    assert (world.checkout / "megatron/core/a.py").read_bytes() == APPLIED_A.encode()
    assert world.run("refresh", world.checkout).out[-1] == "patches and lock are up to date"
