# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Kill the tool (SIGKILL) at each of its steps; the next run must end in a whole tree.

A step is anything that changes the file system or starts a process, as Python's audit events report
it: a new step in the tool is a new case here without anybody adding it. Each run is a forked child
that kills itself just before step n and, for a write, also with the file half written.
"""

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mini import World, snapshot

MUTATIONS = {
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "subprocess.Popen",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Kill:
    """Die before step number ``step``; ``torn``: in the middle of it, where it writes a file."""

    step: int
    torn: bool = False


def steps_of(world: World, flags: list[str], kill: Kill | None) -> str:
    """Run apply in a child that dies as ``kill`` says, or to its end. Without ``kill`` it must
    succeed, and gives a letter per step: w for a write to a file, o for any other."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        steps = []

        def on_event(event, args):
            opens = event == "open" and args[2] & _WRITING and not isinstance(args[0], int)
            if not opens and event not in MUTATIONS:
                return
            if kill and len(steps) == kill.step:
                if kill.torn and opens:
                    steps.append("w")  # so that the write below is no step of its own
                    Path(args[0]).write_bytes(b"torn")
                os.kill(os.getpid(), signal.SIGKILL)
            steps.append("w" if opens else "o")

        sys.addaudithook(on_event)
        result = world.apply(*flags)
        os.write(writing, "".join(result.errors or steps).encode())
        os._exit(result.code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        letters = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGKILL if kill else 0), letters
    return letters


def restore(saved: Path, checkout: Path) -> None:
    shutil.rmtree(checkout)
    shutil.copytree(saved, checkout, symlinks=True)


def kills(steps: str) -> list[Kill]:
    every = [Kill(step) for step in range(len(steps))]
    return every + [Kill(step, torn=True) for step, kind in enumerate(steps) if kind == "w"]


def pristine(world: World) -> None:
    """The tool meets upstream's tree."""


def applied(world: World) -> None:
    """The tool meets a tree with the overlay on."""
    assert world.apply().code == 0


def outdated(world: World) -> None:
    """The tool meets a tree with an earlier state of the patch set on."""
    applied(world)
    world.edit_patch_set()


def killed_while_applying(world: World) -> None:
    """The tool meets a checkout with half of the changes made."""
    saved = world.base / "pristine"
    shutil.copytree(world.checkout, saved)
    for step in reversed(range(len(steps_of(world, [], None)))):
        restore(saved, world.checkout)
        steps_of(world, [], Kill(step))
        run, module = (
            (world.checkout / path).exists()
            for path in ("examples/mimo/run.py", "megatron/core/new/deep/module.py")
        )
        if run and not module:
            return
    raise AssertionError("no step lies between the first and the last change")


@pytest.mark.parametrize(
    "prepare, flags",
    [
        (pristine, []),
        (applied, ["--revert"]),
        (outdated, ["--link"]),
        (killed_while_applying, []),
    ],
    ids=lambda value: value.__name__ if callable(value) else "".join(value) or "apply",
)
def test_a_kill_at_any_step_leaves_what_the_next_run_completes(world, prepare, flags):
    original = snapshot(world.checkout)
    prepare(world)
    saved = world.base / "saved"
    shutil.copytree(world.checkout, saved, symlinks=True)
    steps = steps_of(world, flags, None)
    end, private_end = world.files(), set(snapshot(world.checkout))
    killed, seen = world.base / "killed", []
    for kill in kills(steps):
        restore(saved, world.checkout)
        steps_of(world, flags, kill)
        left = snapshot(world.checkout)
        if left in seen:  # the next run depends on nothing else
            continue
        seen.append(left)
        shutil.copytree(world.checkout, killed, symlinks=True)

        assert world.apply(*flags).code == 0, kill
        assert world.files() == end, kill
        assert set(snapshot(world.checkout)) == private_end, kill

        restore(killed, world.checkout)
        shutil.rmtree(killed)
        assert world.apply("--revert").code == 0, kill
        assert snapshot(world.checkout) == original, kill
    assert len(seen) > 10


def test_an_edit_made_after_a_kill_is_not_lost(world):
    killed_while_applying(world)
    path = world.checkout / "megatron/core/a.py"
    path.write_text("my work\n")
    before = world.files()
    for flags in ([], ["--revert"]):
        result = world.apply(*flags)
        assert result.code == 5
        assert "megatron/core/a.py" in result.errors[0]
        assert world.files() == before


def test_status_after_a_kill_says_partly_applied(world):
    killed_while_applying(world)
    assert world.apply("--status").out[0].startswith("partly applied")
