# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tool that runs upstream's own tests on both trees: sorting, comparing, hangs and refusals."""

from pathlib import Path

import pytest

from mini import UPSTREAM, git, make_repository, write_tree
from upstream_tests import __main__ as cli
from upstream_tests import worlds
from upstream_tests.worlds import World

RUNTIME = "megatron_overlay/megatron/core/cpu_runtime"
FILE = "tests/unit_tests/test_hyper_comm_grid.py"


@pytest.mark.parametrize(
    ("world", "only", "found"),
    [
        (1, "*", ["models/test_radio_model.py", "ssm/ops/test_ssd.py", "ssm/test_ranks.py"]),
        (2, "*", ["ssm/test_ranks.py"]),
        (1, "*ops*", ["ssm/ops/test_ssd.py"]),
    ],
)
def test_files_run_in_the_worlds_that_they_need(tmp_path, world, only, found):
    files = dict.fromkeys(("ssm/ops/test_ssd.py", "ssm/helpers.py", "test_msc.py"), "")
    files |= dict.fromkeys(("ssm/test_ranks.py", "models/test_radio_model.py"), "WORLD_SIZE")
    tree = write_tree(tmp_path, {f"tests/unit_tests/{name}": text for name, text in files.items()})
    assert cli.selected(tree, world, only) == [f"tests/unit_tests/{name}" for name in found]


def checkout(tmp_path: Path, text: str) -> Path:
    """A git checkout of a made-up upstream with one selected test file."""
    files = UPSTREAM | {"tests/__init__.py": "", "tests/unit_tests/__init__.py": ""}
    make_repository(tmp_path, files | {"tests/unit_tests/conftest.py": "", FILE: text})
    return tmp_path


def with_runtime(world) -> None:
    """Give a made-up patch set a CPU runtime, which only says so."""
    runtime = "def install():\n    global installed\n    installed = True\n"
    write_tree(world.root, {f"{RUNTIME}/__init__.py": runtime})
    world.lock()


def test_refusals_have_their_exit_code(world, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none"):
        assert cli.main([str(path)]) == 3
        assert "is not the top of a git checkout" in capsys.readouterr().err
    tree = checkout(tmp_path / "tree", "")
    write_tree(tree, {"megatron/core/a.py": "edited\n"})
    git(tree, "commit", "-qam", "an edit")
    assert cli.reported(lambda: cli.run(tree, [1], "*", root=world.root)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: megatron/core/a.py differs from the lock")


def test_a_failure_and_a_hang_end_one_test_each(world, tmp_path, monkeypatch):
    with_runtime(world)
    monkeypatch.setattr(worlds, "TEST_LIMIT_S", 10)
    text = """
import time
import pytest
import torch
import torch.distributed as dist

def init():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()

def test_sum():
    x = torch.ones(1) * (1 + init())
    dist.all_reduce(x)
    assert x.item() == 3

def test_fails_on_one_rank():
    assert init() == 0, "only here"

def test_runs_after_a_failure():
    test_sum()

def test_hangs_on_one_rank():
    if init() == 1:
        time.sleep(1000)

def test_runs_after_a_hang():
    test_sum()

def test_takes_no_part_on_one_rank():
    if init() == 1:
        pytest.skip("has no part")

def test_takes_no_part_on_any_rank():
    pytest.skip("has no part")
"""
    tree = checkout(tmp_path / "tree", text)
    found = World(tree, 2, world.root / RUNTIME, tmp_path / "run").run([FILE], [])
    by_name = {test.split("::")[1]: outcome for test, outcome in found.items()}
    assert {name: outcome.outcome for name, outcome in by_name.items()} == {
        "test_sum": "passed",
        "test_fails_on_one_rank": "failed",
        "test_runs_after_a_failure": "passed",
        "test_hangs_on_one_rank": "hung",
        "test_runs_after_a_hang": "passed",
        "test_takes_no_part_on_one_rank": "passed",
        "test_takes_no_part_on_any_rank": "skipped",
    }
    assert "only here" in by_name["test_fails_on_one_rank"].reason
    assert "in test_hangs_on_one_rank" in (tmp_path / "run/0/rank1.stacks").read_text()


def test_what_is_lost_twice_is_lost(world, tmp_path, capsys):
    """Both trees are those of the commit, though the overlay is applied to the checkout."""
    with_runtime(world)
    text = """
from pathlib import Path
from typing import override

from megatron.core.cpu_runtime import installed

A = Path("megatron/core/a.py").read_text()

def test_same(): assert installed
def test_lost(): assert "a_3" in A
def test_gained(): assert "A_three" in A
def test_wavers():
    first = not Path("seen").exists()
    Path("seen").touch()
    assert "a_3" in A or not first
"""
    tree = checkout(tmp_path / "tree", text)
    assert world.run("apply", tree).code == 0
    places = {"root": world.root, "runtime": world.root / RUNTIME}
    assert cli.run(tree, [1], "*", **places) == cli.LOST
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "world of 1, pristine: 3 passed, 1 failed",
        "world of 1, applied: 2 passed, 2 failed",
    ]
    assert [line.partition("[1] ")[2].partition(": ")[0] for line in lines[-2:]] == [
        f"{FILE}::test_wavers",
        f"{FILE}::test_lost",
    ]
    assert lines[-1].startswith("LOST: ") and "a_3" in lines[-1]


def test_a_branch_takes_the_place_of_the_applied_tree(world, tmp_path, monkeypatch):
    tree, seen = checkout(tmp_path / "tree", ""), {}
    git(tree, "checkout", "-q", "-b", "staged")
    write_tree(tree, {"README.md": "staged\n"})
    git(tree, "commit", "-qam", "staged")
    git(tree, "checkout", "-q", "main")

    def run(world, files, excluded):
        seen[world._tree.name] = (world._tree / "README.md").read_text()
        return {}

    monkeypatch.setattr(World, "run", run)
    assert cli.run(tree, [1], "*", "staged", root=world.root) == 0
    assert seen == {"pristine": "upstream\n", "applied": "staged\n"}
    assert cli.main([str(tree), "--branch", "none"]) == 3


def test_ranks_that_cannot_start_hang_every_file(world, tmp_path):
    with_runtime(world)
    tree = checkout(tmp_path / "tree", "def test_a(): pass\n")
    (tree / "tests/unit_tests/conftest.py").write_text("raise SystemExit('no start')\n")
    found = World(tree, 1, world.root / RUNTIME, tmp_path / "run").run([FILE], [])
    assert found[FILE].outcome == "hung" and "no start" in found[FILE].reason
