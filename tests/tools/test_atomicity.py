# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Kill the tool (SIGKILL) at each of its steps; a whole tree must come.

A step is anything that changes the file system, but for files that lie elsewhere, as Python's audit
events report it: a new step in the tool is a new case here without anybody adding it. Each run is a
forked child, which ends just before step n or, for a write, also with the file half written.
"""

import functools
import itertools
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


def is_killed(world: World, flags: list[str], end: int, torn: bool = False) -> bool:
    """Run apply in a child that is killed in step ``end``, if it comes so far; else it succeeds.

    torn: kill it in the middle of the step if that is a write.
    """
    world.apply("--check")  # git's answers are known to all children then
    child, base = os.fork(), world.base
    if child == 0:
        left = [end]

        def on_event(event, args):
            opens = event == "open" and args[2] & _WRITING and not isinstance(args[0], int)
            if not opens and event not in MUTATIONS:
                return
            if os.path.isabs(path := os.fspath(args[0])) and not Path(path).is_relative_to(base):
                return
            left[0] -= 1
            if left[0] == -1:
                if torn and opens:
                    Path(args[0]).write_bytes(b"torn")
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(on_event)
        os._exit(world.apply(*flags).code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


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
    for step in itertools.count():
        copy(world.base / "pristine", world.checkout)
        assert is_killed(world, [], step), "no step lies between the first and the last change"
        if [(world.checkout / path).exists() for path in (RUN, MODULE)] == [True, False]:
            return


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
    assert world.apply(*flags).code == 0
    end, private_end = world.files(), set(snapshot(world.checkout))
    for one in ((step, torn) for step in itertools.count() for torn in (False, True)):
        copy(saved, world.checkout)
        if not is_killed(world, flags, *one):
            break
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
