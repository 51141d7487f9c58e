# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tool that runs upstream's own tests on both trees: sorting, comparing, hangs and refusals."""

import json
import shutil
from pathlib import Path

import pytest

from mini import REPOSITORY, UPSTREAM, write_tree
from upstream_tests import cli, outcomes, report, worlds
from upstream_tests.comparison import Comparison, Runner
from upstream_tests.outcomes import PASSED, Outcome
from upstream_tests.selection import Selection, matching
from upstream_tests.trees import Overlay, TreeError
from upstream_tests.worlds import World

CPU_RUNTIME = REPOSITORY / "megatron_overlay/megatron/core/cpu_runtime"
SELECTION = Selection.read(REPOSITORY / "tools/upstream_tests/selection.toml")
FILE = "tests/unit_tests/test_hyper_comm_grid.py"


class TestOutcomes:
    @pytest.mark.parametrize(
        ("ranks", "merged"),
        [
            (["passed", "passed"], "passed"),
            (["passed", "skipped"], "passed"),
            (["skipped", "skipped"], "skipped"),
            (["passed", "failed"], "failed"),
            (["failed", "hung"], "hung"),
        ],
    )
    def test_a_test_passes_if_it_passes_on_every_rank_that_takes_part(self, ranks, merged):
        assert outcomes.merge([Outcome(rank, rank) for rank in ranks])[:2] == (merged, merged)

    def test_a_test_that_a_rank_began_and_did_not_finish_has_crashed(self, tmp_path):
        def record(rank, *lines):
            (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)))

        done = {"test": "a", "outcome": "passed", "reason": "", "seconds": 1.0}
        begun = [{"collected": ["a", "b", "c"]}, {"begins": "a"}, done, {"begins": "b"}]
        record(0, *begun, {**done, "test": "b"})
        record(1, *begun)
        found = outcomes.read_records(tmp_path, 2)
        assert found.fatal == ["b"]
        assert {test: outcome.outcome for test, outcome in found.outcomes.items()} == {
            "a": "passed",
            "b": "crashed",
        }

    def test_a_test_that_vanishes_or_skips_on_the_applied_tree_is_lost(self):
        before = {"gone": PASSED, "skips": PASSED, "same": PASSED, "better": Outcome("failed")}
        after = {"skips": Outcome("skipped"), "same": PASSED, "better": PASSED}
        assert outcomes.difference(before, after) == (["gone", "skips"], ["better"])


class TestReport:
    @pytest.mark.parametrize(
        ("outcome", "column"),
        [
            (PASSED, "passed"),
            (Outcome("failed", "assert 1 == 2"), "failed"),
            (Outcome("skipped", "Skipped: unconditional skip"), "skipped"),
            (Outcome("crashed", "a rank ended during the test"), "hung"),
            (Outcome("failed", "RuntimeError: world_size (2) is not divisible by 4"), "ranks"),
            (Outcome("skipped", "Skipped: Requires 8 GPUs, got 2"), "ranks"),
            (
                Outcome("failed", "E No module named 'transformer_engine'"),
                "gpu",
            ),
            (Outcome("failed", "NotImplementedError: torch.cuda.cudart has no equivalent"), "gpu"),
            (Outcome("skipped", "Skipped: emerging_optimizers package not installed"), "package"),
        ],
    )
    def test_what_a_failure_lacks_is_read_from_what_it_says(self, outcome, column):
        assert report.sort_of(outcome, SELECTION) == column

    def test_the_table_counts_areas_and_all(self):
        before = {f"{FILE}::a": PASSED, f"{FILE}::b": PASSED, f"{FILE}::c": Outcome("failed")}
        after = {f"{FILE}::a": PASSED, f"{FILE}::c": PASSED}
        lost = {2: [f"{FILE}::b"]}
        found = Comparison("1.2.3", {2: before}, {2: after}, lost, {2: []})
        lines = report.counts_table(found, {FILE: "grid"}, SELECTION)
        assert lines[0].split("|")[1:4] == [" world ", " area ", " passed "]
        for line, area in zip(lines[2:], ("grid", "all"), strict=True):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells == ["2", area, "2", "0", "0", "0", "1", "0", "0", "2", "1", "1"]
        assert f"- [2] {FILE}::b: gone " in report.summary(found, {FILE: "grid"}, SELECTION)

    def test_a_test_that_passes_in_some_world_can_run(self):
        lacks = Outcome("failed", "E No module named 'transformer_engine'")
        runs = {1: {f"{FILE}::a": lacks, f"{FILE}::b": lacks}, 2: {f"{FILE}::a": PASSED}}
        assert report.unable_rows(runs, SELECTION, "gpu") == [
            ["Transformer Engine", 1, "test_hyper_comm_grid.py 1"]
        ]


class TestSelection:
    def test_the_first_area_that_names_a_file_has_it(self, tmp_path):
        files = ("ssm/test_gated_delta_net.py", "ssm/test_mamba_layer.py", "ssm/helpers.py")
        tree = write_tree(tmp_path, {f"tests/unit_tests/{name}": "" for name in files})
        assert SELECTION.files(tree) == {
            "tests/unit_tests/ssm/test_gated_delta_net.py": "GDN",
            "tests/unit_tests/ssm/test_mamba_layer.py": "Mamba",
        }

    @pytest.mark.parametrize(
        ("pattern", "found"), [("GRID", ["a"]), ("b*.py", ["b.py"]), ("x", [])]
    )
    def test_a_pattern_is_looked_for_in_paths_and_areas(self, pattern, found):
        assert list(matching({"a": "grid", "b.py": "MIMO"}, pattern)) == found


def checkout(tmp_path: Path, tests: dict[str, str]) -> Path:
    """A made-up upstream tree whose selected test files are `tests`."""
    files = UPSTREAM | {"tests/__init__.py": "", "tests/unit_tests/__init__.py": ""}
    files |= {"tests/unit_tests/conftest.py": ""}
    return write_tree(tmp_path, files | {f"tests/unit_tests/{k}": v for k, v in tests.items()})


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
        marker = "megatron_overlay/megatron/core/cpu_runtime/__init__.py"
        write_tree(world.root, {marker: "ours\n"})
        tool = (
            f'#!/bin/sh\nexec python3 {REPOSITORY}/tools/overlay --root {world.root} apply "$@"\n'
        )
        write_tree(world.root, {"tools/apply_overlay.sh": tool})
        (world.root / "tools/apply_overlay.sh").chmod(0o755)
        world.lock()
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
        with pytest.raises(TreeError, match="^edited$") as refusal:
            Overlay(world.root).applied_copy(world.checkout, tmp_path / "applied")
        assert refusal.value.code == 4


class TestRuns:
    def test_a_failure_on_one_rank_and_a_hang_end_one_test_each(self, tmp_path, monkeypatch):
        monkeypatch.setattr(worlds, "TEST_LIMIT_S", 10)
        text = """
import time
import pytest
import torch
import torch.distributed as dist

def init():
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    return dist.get_rank()

def test_sum():
    x = torch.ones(1, device="cuda") * (1 + init())
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
"""
        tree = checkout(tmp_path / "tree", {"test_hyper_comm_grid.py": text})
        found = World(tree, 2, CPU_RUNTIME, tmp_path / "run").run([FILE], [], lambda line: None)
        by_name = {test.split("::")[1]: outcome for test, outcome in found.items()}
        assert {name: outcome.outcome for name, outcome in by_name.items()} == {
            "test_sum": "passed",
            "test_fails_on_one_rank": "failed",
            "test_groups_are_whole_after_a_failure": "passed",
            "test_hangs_on_one_rank": "hung",
            "test_runs_after_a_hang": "passed",
            "test_takes_no_part_on_one_rank": "passed",
        }
        assert "only here" in by_name["test_fails_on_one_rank"].reason

    def test_what_is_lost_twice_is_lost_and_the_pristine_tree_runs_once(self, tmp_path):
        text = """
from pathlib import Path
from typing import override

def test_same(): pass
def test_lost(): assert "a_3" in Path("megatron/core/a.py").read_text()
def test_gained(): assert "A_three" in Path("megatron/core/a.py").read_text()
def test_wavers():
    first = not Path("seen").exists()
    Path("seen").touch()
    assert "a_3" in Path("megatron/core/a.py").read_text() or not first
"""
        pristine = checkout(tmp_path / "pristine", {"test_hyper_comm_grid.py": text})
        applied = shutil.copytree(pristine, tmp_path / "applied")
        (applied / "megatron/core/a.py").write_text("A_three\n")
        work = tmp_path / "work"
        work.mkdir()
        runner = Runner(work, CPU_RUNTIME, SELECTION, {FILE: "grid"}, [1])
        found = runner.compare(pristine, applied)
        assert found.lost == {1: [f"{FILE}::test_lost"]}
        assert found.wavering == {1: [f"{FILE}::test_wavers"]}
        assert outcomes.difference(found.pristine[1], found.applied[1]).gained == [
            f"{FILE}::test_gained"
        ]
        shutil.rmtree(work / "runs")
        assert runner.compare(pristine, None).pristine == found.pristine
        assert not (work / "runs").exists()

    def test_ranks_that_cannot_start_crash_every_file(self, tmp_path):
        tree = checkout(tmp_path / "tree", {"test_hyper_comm_grid.py": "def test_a(): pass\n"})
        (tree / "tests/unit_tests/conftest.py").write_text("raise SystemExit('no start')\n")
        found = World(tree, 1, CPU_RUNTIME, tmp_path / "run").run([FILE], [], lambda line: None)
        assert found[FILE].outcome == "crashed"
