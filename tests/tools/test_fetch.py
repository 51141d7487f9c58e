# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetching puts a version in place, or nothing."""

import os
import shutil
import subprocess

import pytest

import mini
from mini import LATER, PIN, REPOSITORY, SECOND, UPSTREAM, git, snapshot, write_tree


@pytest.mark.parametrize("version", [PIN, SECOND, LATER])
def test_the_cached_archive_becomes_the_checkout_without_a_network(world, version):
    target = world.base / "fetched"
    assert world.run("fetch", target, "--version", version).code == 0
    assert (target / "README.md").read_text() == UPSTREAM["README.md"]
    assert (target / "megatron/core/mini.package_info.py").read_text() == mini.package_info(version)
    before = snapshot(world.base)
    again = world.run("fetch", target, "--version", version)
    assert (again.code, again.out) == (0, [f"{target}: already Megatron-LM {version}"])
    assert snapshot(world.base) == before


def test_a_commit_of_main_comes_from_a_git_directory(world):
    mini.make_repository(world.base / "remote", mini.LATER_UPSTREAM)
    commit = git(world.base / "remote", "rev-parse", "HEAD")
    world.edit_lock(lambda text: text.replace("1" * 40, commit))
    assert world.run("fetch", world.base / "new", "--next", world.base / "remote").code == 0
    texts = {path: (world.base / "new" / path).read_text() for path in mini.LATER_UPSTREAM}
    assert texts == mini.LATER_UPSTREAM


def other_hash(world, monkeypatch):
    old = world.root / f"build/cache/mini-{PIN}.tar.gz"
    old.write_bytes(old.read_bytes() + b"more")


def no_cache(world, monkeypatch):
    """pip finds nothing, and nothing is in the cache."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(world.base))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    shutil.rmtree(world.root / "build/cache")


def outside(world, _):
    world.add_version("9.0.0", UPSTREAM, top="../")


@pytest.mark.parametrize(
    "arrange, args, code, message",
    [
        (None, ["mine"], 3, "is not a Megatron-LM checkout"),
        (None, ["checkout", "--version", SECOND], 3, f"this overlay needs {SECOND}"),
        (None, ["new", "--version", "9"], 3, f"the lock has {PIN} and {SECOND} and {LATER}, not 9"),
        (outside, ["new", "--version", "9.0.0"], 1, "refused to unpack"),
        (other_hash, ["new"], 4, "the lock wants"),
        (no_cache, ["new"], 1, "pip install failed"),
        (no_cache, ["new", "--version", LATER], 3, "give a git directory that has it with --next"),
        (no_cache, ["new", "--next", "nowhere"], 1, "git archive failed"),
        (no_cache, ["new", "--next", str(REPOSITORY)], 1, "git archive failed"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_line_and_leaves_nothing(
    world, monkeypatch, arrange, args, code, message
):
    write_tree(world.base / "mine", {"work.txt": "precious"})
    if arrange:
        arrange(world, monkeypatch)
    before = snapshot(world.checkout), snapshot(world.base / "mine")
    result = world.run("fetch", world.base / args[0], *args[1:])
    assert (result.code, len(result.errors)) == (code, 1)
    assert message in result.errors[0]
    assert (snapshot(world.checkout), snapshot(world.base / "mine")) == before
    assert sorted(path.name for path in world.base.iterdir()) == ["checkout", "mine", "ours"]


@pytest.mark.parametrize("script", ["fetch_upstream.sh", "apply_overlay.sh"])
def test_a_missing_python_is_one_line(tmp_path, script):
    shutil.copytree(REPOSITORY / "tools", tmp_path / "tools")
    env = os.environ | {"PYTHON": "no-such-python"}
    command = [tmp_path / "tools" / script, "x"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no-such-python is missing or older than Python 3.11")
    assert done.stderr.count("\n") == 1
