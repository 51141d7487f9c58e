# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetching puts the pin in place, or nothing."""

import os
import shutil
import subprocess

import pytest

from mini import (
    LATER,
    PIN,
    REPOSITORY,
    SECOND,
    UPSTREAM,
    git,
    make_repository,
    package_info,
    snapshot,
    write_tree,
)


@pytest.mark.parametrize("version", [PIN, SECOND])
def test_the_cached_sdist_becomes_the_checkout_without_a_network(world, version):
    target = world.base / "fetched"
    assert world.run("fetch", target, "--version", version).code == 0
    assert {path.name for path in target.iterdir()} == {"megatron", "README.md"}
    assert (target / "megatron/core/package_info.py").read_text() == package_info(version)
    before = snapshot(world.base)
    again = world.run("fetch", target, "--version", version)
    assert (again.code, again.out) == (0, [f"{target}: already Megatron-LM {version}"])
    assert snapshot(world.base) == before


def other_hash(world, monkeypatch):
    old = world.root / f"build/cache/mini-{PIN}.tar.gz"
    old.write_bytes(old.read_bytes() + b"more")


def no_index(world, monkeypatch):
    """pip finds nothing, and nothing is in the cache."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(world.base))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    shutil.rmtree(world.root / "build/cache")


@pytest.mark.parametrize(
    "arrange, args, code, message",
    [
        (None, ["mine"], 3, "is not a Megatron-LM checkout"),
        (None, ["checkout", "--version", SECOND], 3, f"this overlay needs {SECOND}"),
        (None, ["new", "--version", "9"], 3, f"the lock has {PIN} and {SECOND}, not 9"),
        (lambda w, _: w.add_version(LATER, UPSTREAM, prefix="../"), ["new", "--version", LATER], 1,
         "refused to unpack"),
        (other_hash, ["new"], 4, "the lock wants"),
        (no_index, ["new"], 1, "pip install failed"),
        (None, ["new", "--git", "/no/where"], 1, "git clone /no/where failed"),
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


@pytest.mark.parametrize(
    "lock, touched, message",
    [
        (lambda commit: commit, False, None),
        (lambda commit: "1" * 40, False, f"the lock wants {'1' * 40}"),
        (None, False, None),
        (None, True, "megatron/core/a.py differs from the lock"),
    ],
    ids=["locked", "another", "not locked", "not locked, changed"],
)
def test_a_clone_is_of_the_locked_commit_or_has_the_locked_files(world, lock, touched, message):
    remote, target = world.base / "remote", world.base / "fetched"
    make_repository(remote, UPSTREAM | ({"megatron/core/a.py": "other\n"} if touched else {}))
    git(remote, "tag", f"v{PIN}")
    if lock:
        line = f'commit = "{lock(git(remote, "rev-parse", "HEAD"))}"'
        world.edit_lock(lambda text: text.replace(tag := f'tag = "v{PIN}"', f"{tag}\n{line}"))
    result = world.run("fetch", "--git", f"file://{remote}", target)
    if message:
        assert (result.code, len(result.errors)) == (4, 1)
        assert message in result.errors[0]
        assert not [path for path in world.base.iterdir() if "fetched" in path.name]
    else:
        assert result.code == 0
        assert git(target, "rev-parse", "HEAD") == git(remote, "rev-parse", f"v{PIN}")


@pytest.mark.parametrize("script", ["fetch_upstream.sh", "apply_overlay.sh"])
def test_a_missing_python_is_one_line(tmp_path, script):
    shutil.copytree(REPOSITORY / "tools", tmp_path / "tools")
    env = os.environ | {"PYTHON": "no-such-python"}
    command = [tmp_path / "tools" / script, "x"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no-such-python is missing or older than Python 3.11")
    assert done.stderr.count("\n") == 1
