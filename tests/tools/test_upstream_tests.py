# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tool that runs upstream's own tests on both trees: sorting, comparing, hangs and refusals."""

from pathlib import Path

import pytest

from mini import REPOSITORY, UPSTREAM, write_tree
from overlay.errors import OverlayError
from upstream_tests import cli, report, worlds
from upstream_tests.comparison import Comparison
from upstream_tests.outcomes import PASSED, Outcome
from upstream_tests.selection import Selection
from upstream_tests.trees import Overlay
from upstream_tests.worlds import World

RUNTIME = "megatron_overlay/megatron/core/cpu_runtime"
SELECTION = Selection.read(REPOSITORY / "tools/upstream_tests/selection.toml")
FILE = "tests/unit_tests/test_hyper_comm_grid.py"


class TestReport:
    failed, lacks = Outcome("failed", "assert 1 == 2"), Outcome("skipped", "no GPU")
    before = {"a": PASSED, "b": PASSED, "c": failed, "d": failed, "e": lacks, "f": lacks}
    after = {"a": PASSED, "c": PASSED, "d": failed, "e": lacks, "f": lacks}
    found = {
        2: Comparison(before, after, lost=["b"], wavering=[]),
        4: Comparison({"f": PASSED}, {"f": PASSED}, [], []),
    }

    def test_the_table_counts_each_test_once(self):
        heads, _, row, _ = (line.split() for line in report.counts_table(self.found))
        counts = {head: int(n) for head, n in zip(heads, row, strict=True) if n not in ("0", "|")}
        assert counts.pop("world") == counts.pop("pristine") == counts.pop("applied") == 2
        assert counts == {"lost": 1, "gained": 1, "failed": 1, "skipped": 2}

    def test_lists_name_what_is_lost_and_why_tests_pass_in_no_world(self):
        lines = report.summary("1.2.3", self.found, {"x": "a reason"})
        assert "- [2] b: gone " in lines and "- x: a reason" in lines
        place = lines.index("Pass in no world, by what they say:")
        assert lines[place + 1] == "- failed: assert 1 == 2: d 1"
        assert lines[place + 2] == "- skipped: no GPU: e 1"


class TestSelection:
    files = ("ssm/test_gated_delta_net.py", "ssm/ops/test_ssd.py", "ssm/helpers.py", "test_msc.py")

    @pytest.mark.parametrize(
        ("world", "only", "found"),
        [
            (1, "*", ["ssm/ops/test_ssd.py", "ssm/test_gated_delta_net.py"]),
            (2, "*", ["ssm/test_gated_delta_net.py"]),
            (1, "*ops*", ["ssm/ops/test_ssd.py"]),
        ],
    )
    def test_files_run_in_the_worlds_that_they_need(self, tmp_path, world, only, found):
        tree = write_tree(tmp_path, {f"tests/unit_tests/{name}": "" for name in self.files})
        paths = [f"tests/unit_tests/{name}" for name in found]
        assert SELECTION.files(tree, world, only) == paths


def checkout(tmp_path: Path, tests: dict[str, str]) -> Path:
    """A made-up upstream tree whose selected test files are `tests`."""
    files = UPSTREAM | {"tests/__init__.py": "", "tests/unit_tests/__init__.py": ""}
    files |= {"tests/unit_tests/conftest.py": ""}
    return write_tree(tmp_path, files | {f"tests/unit_tests/{k}": v for k, v in tests.items()})


def with_tool(world) -> None:
    """Give a made-up patch set a CPU runtime, which only says so, and the command to apply it."""
    tool = f'#!/bin/sh\nexec python3 {REPOSITORY}/tools/overlay --root {world.root} apply "$@"\n'
    runtime = "def install():\n    global installed\n    installed = True\n"
    write_tree(world.root, {f"{RUNTIME}/__init__.py": runtime, "tools/apply_overlay.sh": tool})
    (world.root / "tools/apply_overlay.sh").chmod(0o755)
    world.lock()


class TestTrees:
    def test_a_checkout_without_tests_is_refused(self, tmp_path, capsys):
        tree = write_tree(tmp_path, UPSTREAM)
        assert cli.main([str(tree)]) == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "has no tests/unit_tests" in line

    def test_a_folder_that_is_no_checkout_is_refused(self, tmp_path, capsys):
        assert cli.main([str(tmp_path)]) == 3
        assert "not a Megatron-LM checkout" in capsys.readouterr().err

    @pytest.mark.parametrize("applied", [False, True])
    def test_copies_are_pristine_and_applied_and_the_checkout_stays(self, world, tmp_path, applied):
        with_tool(world)
        if applied:
            assert world.apply().code == 0
        before = world.files()
        overlay = Overlay(world.root)
        pristine = overlay.pristine_copy(world.checkout, tmp_path / "pristine")
        copy = overlay.applied_copy(pristine, tmp_path / "applied")
        text = UPSTREAM["megatron/core/a.py"]
        assert (pristine / "megatron/core/a.py").read_text() == text
        assert (copy / "megatron/core/a.py").read_text() != text
        assert not (pristine / "megatron/core/cpu_runtime").exists()
        assert world.files() == before

    def test_what_the_overlay_refuses_is_said_with_its_exit_code(self, world, tmp_path):
        tool = "#!/bin/sh\necho 'error: edited' >&2\nexit 4\n"
        write_tree(world.root, {"tools/apply_overlay.sh": tool})
        (world.root / "tools/apply_overlay.sh").chmod(0o755)
        with pytest.raises(OverlayError, match="^edited$") as refusal:
            Overlay(world.root).applied_copy(world.checkout, tmp_path / "applied")
        assert refusal.value.code == 4


class TestRuns:
    def test_a_failure_and_a_hang_end_one_test_each(self, world, tmp_path, monkeypatch):
        with_tool(world)
        monkeypatch.setattr(worlds, "TEST_LIMIT_S", 5)
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

def test_groups_are_whole_after_a_failure():
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
        tree = checkout(tmp_path / "tree", {"test_hyper_comm_grid.py": text})
        found = World(tree, 2, world.root / RUNTIME, tmp_path / "run").run([FILE], [], print)
        by_name = {test.split("::")[1]: outcome for test, outcome in found.items()}
        assert {name: outcome.outcome for name, outcome in by_name.items()} == {
            "test_sum": "passed",
            "test_fails_on_one_rank": "failed",
            "test_groups_are_whole_after_a_failure": "passed",
            "test_hangs_on_one_rank": "hung",
            "test_runs_after_a_hang": "passed",
            "test_takes_no_part_on_one_rank": "passed",
            "test_takes_no_part_on_any_rank": "skipped",
        }
        assert "only here" in by_name["test_fails_on_one_rank"].reason

    def test_what_is_lost_twice_is_lost(self, world, tmp_path, capsys):
        with_tool(world)
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
        tree = checkout(tmp_path / "tree", {"test_hyper_comm_grid.py": text})
        assert cli.run(tree, [1], "*", world.root, world.root / RUNTIME) == cli.LOST
        _, _, _, _, row, *lists = capsys.readouterr().out.splitlines()
        assert row.replace("|", "").split()[:5] == ["1", "3", "2", "1", "1"]
        assert [line.partition(": ")[0] for line in lists if line.startswith("- [1] ")] == [
            f"- [1] {FILE}::test_wavers",
            f"- [1] {FILE}::test_lost",
        ]

    def test_ranks_that_cannot_start_hang_every_file(self, world, tmp_path):
        with_tool(world)
        tree = checkout(tmp_path / "tree", {"test_hyper_comm_grid.py": "def test_a(): pass\n"})
        (tree / "tests/unit_tests/conftest.py").write_text("raise SystemExit('no start')\n")
        found = World(tree, 1, world.root / RUNTIME, tmp_path / "run").run([FILE], [], print)
        assert found[FILE].outcome == "hung" and "no start" in found[FILE].reason
