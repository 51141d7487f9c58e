# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Kill the tool (SIGKILL) at each of its steps; a whole tree must come.

A step is anything that changes the file system, but for files that lie elsewhere, as Python's audit
events report it: a new step in the tool is a new case here without anybody adding it. Each run is a
forked child, which ends just before step n or, for a write, also with the file half written.
"""

import functools
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from mini import MODULE, RUN, A, World, snapshot
from overlay import git

MUTATIONS = {f"os.{name}" for name in "chmod link mkdir remove rename rmdir symlink".split()}
MUTATIONS |= {"os.truncate", "os.utime"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@pytest.fixture(autouse=True)
def _git_applies_a_patch_once(monkeypatch):
    apply = git.apply
    known = functools.cache(lambda name, patch, files: apply(name, patch, dict(files)))
    monkeypatch.setattr(git, "apply", lambda *of: known(*of[:2], tuple(of[2].items())))


def steps_of(world: World, flags: list[str], end: int = -1, torn: bool = False) -> str:
    """Run apply in a child that is killed in step ``end``, or else succeeds.

    Return a letter for each step: w for a write to a file, o for any other.

    torn: kill it in the middle of a write.
    """
    world.apply("--check")  # git's answers are known to all children then
    reading, writing = os.pipe()
    base = world.base
    child = os.fork()
    if child == 0:
        steps = []

        def on_event(event, args):
            opens = event == "open" and args[2] & _WRITING and not isinstance(args[0], int)
            if not opens and event not in MUTATIONS:
                return
            if os.path.isabs(path := os.fspath(args[0])) and not Path(path).is_relative_to(base):
                return
            steps.append("w" if opens else "o")
            if len(steps) - 1 == end:
                if torn:
                    Path(args[0]).write_bytes(b"torn")
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(on_event)
        code = world.apply(*flags).code
        os.write(writing, "".join(steps).encode())
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        letters = stream.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (
        -signal.SIGKILL if end >= 0 else 0
    )
    return letters


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)


def outdated(world: World) -> None:
    """The tool meets a tree with an earlier state of the patch set on."""
    world.apply()
    world.edit_patch_set()


def killed_while_applying(world: World) -> None:
    """The tool meets a tree that a killed run left between its first and its last change."""
    copy(world.checkout, world.base / "pristine")
    for step in range(len(steps_of(world, []))):
        copy(world.base / "pristine", world.checkout)
        steps_of(world, [], step)
        if [(world.checkout / path).exists() for path in (RUN, MODULE)] == [True, False]:
            return
    raise AssertionError("no step lies between the first and the last change")


@pytest.mark.parametrize(
    "prepare, flags",
    [
        (lambda world: None, []),
        (lambda world: world.apply(), ["--revert"]),
        (outdated, ["--link"]),
        (killed_while_applying, []),
    ],
    ids=["apply", "revert", "update", "repair"],
)
def test_a_kill_at_any_step_leaves_what_the_next_run_completes(world, prepare, flags):
    original = snapshot(world.checkout)
    prepare(world)
    saved, ended, seen = world.base / "saved", world.base / "ended", []
    copy(world.checkout, saved)
    steps = steps_of(world, flags)
    end, private_end = world.files(), set(snapshot(world.checkout))
    ends = [(step, False) for step in range(len(steps))]
    ends += [(step, True) for step, kind in enumerate(steps) if kind == "w"]
    for one in ends:
        copy(saved, world.checkout)
        steps_of(world, flags, *one)
        left = snapshot(world.checkout)
        if left in seen:  # the next run depends on nothing else
            continue
        seen.append(left)
        copy(world.checkout, ended)
        assert world.apply(*flags).code == 0, one
        assert world.files() == end, one
        assert set(snapshot(world.checkout)) == private_end, one
        copy(ended, world.checkout)
        assert world.apply("--revert").code == 0, one
        assert snapshot(world.checkout) == original, one
    assert len(seen) > 10


def test_an_edit_made_after_a_kill_is_not_lost(world):
    killed_while_applying(world)
    assert world.apply("--status").out[0].startswith("partly applied")
    (world.checkout / A).write_text("my work\n")
    before = world.files()
    for flags in ([], ["--revert"]):
        result = world.apply(*flags)
        assert (result.code, A in result.errors[0]) == (5, True)
        assert world.files() == before
