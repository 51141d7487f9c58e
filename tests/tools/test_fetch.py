# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetching puts the pin in place, or nothing."""

import os
import shutil
import subprocess

import pytest

from mini import (
    LATER,
    OVERLAY,
    PIN,
    REPOSITORY,
    SECOND,
    UPSTREAM,
    World,
    git,
    make_repository,
    package_info,
    snapshot,
    write_tree,
)


def lock_commit(world: World, commit: str) -> None:
    lock = world.root / "patches/upstream.toml"
    lock.write_text(
        lock.read_text().replace(
            'sdist = "mini==1.2.3"',
            f"""sdist = "mini==1.2.3"
commit = "{commit}\"""",
        )
    )


@pytest.fixture
def remote(world):
    """A remote with the tag, whose commit the lock names; it has a file that the sdist lacks."""
    path = world.base / "remote"
    others = {"examples/mimo/run.py": "upstream's own\n", ".gitignore": "build\n"}
    make_repository(path, UPSTREAM | others)
    git(path, "tag", "v1.2.3")
    lock_commit(world, git(path, "rev-parse", "HEAD"))
    return path


@pytest.fixture
def clone(world, remote):
    shutil.rmtree(world.checkout)
    assert world.run("fetch", "--git", f"file://{remote}", world.checkout).code == 0
    return world.checkout


@pytest.mark.parametrize("version", [PIN, SECOND])
def test_the_cached_sdist_becomes_the_checkout_without_a_network(world, version):
    target = world.base / "fetched"
    assert world.run("fetch", target, "--version", version).code == 0
    assert {path.name for path in target.iterdir()} == {"megatron", "README.md"}
    assert (target / "megatron/core/package_info.py").read_text() == package_info(version)
    assert not list(world.base.glob(".fetched*"))


def test_a_right_checkout_is_kept(world):
    before = snapshot(world.checkout)
    result = world.run("fetch", world.checkout)
    assert (result.code, result.out) == (0, [f"{world.checkout}: already Megatron-LM 1.2.3"])
    assert snapshot(world.checkout) == before


@pytest.mark.parametrize(
    "args", [("mine",), ("checkout", "--version", SECOND), ("new", "--version", "9")]
)
def test_what_is_not_the_version_asked_for_exits_3_and_is_kept(world, args):
    write_tree(world.base / "mine", {"work.txt": "precious"})
    before = snapshot(world.base)
    assert world.run("fetch", world.base / args[0], *args[1:]).code == 3
    assert snapshot(world.base) == before


def test_an_sdist_with_another_sha256_is_refused_before_it_is_unpacked(world):
    world.set_lock("sdist_sha256", "1" * 64)
    result = world.run("fetch", world.base / "fetched")
    assert result.code == 4
    assert "the lock wants 1111" in result.errors[0]
    assert not (world.base / "fetched").exists()


def test_an_sdist_that_writes_outside_is_refused(world):
    world.add_version(LATER, UPSTREAM, prefix="../")
    before = snapshot(world.base)
    result = world.run("fetch", world.base / "fetched", "--version", LATER)
    assert (result.code, len(result.errors)) == (1, 1)
    assert snapshot(world.base) == before


def test_a_failed_download_is_one_line_and_leaves_nothing(world, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(world.base))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    shutil.rmtree(world.root / "build/cache")
    result = world.run("fetch", world.base / "fetched")
    assert (result.code, len(result.errors)) == (1, 1)
    assert not (world.base / "fetched").exists()
    assert not list((world.root / "build/cache").iterdir())


def test_git_clone_of_the_tag(clone, remote):
    assert git(clone, "rev-parse", "HEAD") == git(remote, "rev-parse", "v1.2.3")


def test_a_tag_on_another_commit_is_refused_and_nothing_is_left(world, remote):
    world.set_lock("commit", "1" * 40)
    result = world.run("fetch", "--git", f"file://{remote}", world.base / "fetched")
    assert result.code == 4
    assert "the lock wants 1111" in result.errors[0]
    assert not [path for path in world.base.iterdir() if "fetched" in path.name]


@pytest.mark.parametrize("touched", [False, True])
def test_without_a_locked_commit_the_files_that_we_change_are_checked(world, touched):
    path = world.base / "remote"
    make_repository(path, UPSTREAM | ({"megatron/core/a.py": "other\n"} if touched else {}))
    git(path, "tag", "v1.2.3")
    result = world.run("fetch", "--git", f"file://{path}", world.base / "fetched")
    if touched:
        assert result.code == 4
        assert "megatron/core/a.py differs from the lock" in result.errors[0]
    else:
        assert "not in the lock: its 3 files that we change are as locked" in result.out[0]
    assert (world.base / "fetched").exists() != touched


def test_a_remote_that_is_not_there_is_one_line(world):
    result = world.run("fetch", "--git", str(world.base / "nowhere"), world.base / "fetched")
    assert (result.code, len(result.errors)) == (1, 1)


def test_git_does_not_see_the_private_folder(world, clone):
    assert world.apply().code == 0
    status = git(clone, "status", "--porcelain")
    assert ".mimo-overlay" not in status
    assert "megatron/core/a.py" in status


def test_revert_leaves_a_git_checkout_clean(world, clone):
    world.apply()
    assert world.apply("--revert").code == 0
    assert git(clone, "status", "--porcelain", "--ignored") == ""


def test_a_file_of_the_pinned_commit_is_replaced_by_the_overlay_file(world, clone):
    assert world.apply().code == 0
    assert world.text("examples/mimo/run.py") == OVERLAY["examples/mimo/run.py"]


def test_an_edited_file_of_the_pinned_commit_is_not_replaced(world, clone):
    (clone / "examples/mimo/run.py").write_text("edited\n")
    result = world.apply()
    assert result.code == 5
    assert "examples/mimo/run.py" in result.errors[0]


def test_apply_to_a_worktree_writes_nothing_into_its_repository(world, clone):
    worktree = world.base / "worktree"
    git(clone, "worktree", "add", "--detach", str(worktree))
    before = snapshot(clone)
    assert world.run("apply", worktree).code == 0
    assert snapshot(clone) == before
    assert world.run("apply", worktree, "--revert").code == 0
    assert git(worktree, "status", "--porcelain", "--ignored") == ""


@pytest.mark.parametrize("script", ["fetch_upstream.sh", "apply_overlay.sh"])
def test_a_missing_python_is_one_line(tmp_path, script):
    shutil.copytree(REPOSITORY / "tools", tmp_path / "tools")
    done = subprocess.run(
        [tmp_path / "tools" / script, "x"],
        env=os.environ | {"PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no-such-python is missing or older than Python 3.11")
    assert done.stderr.count("\n") == 1
