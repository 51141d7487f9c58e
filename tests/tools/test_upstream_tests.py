# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tool that runs upstream's own tests on both trees: outcomes, hangs, lost tests, refusals."""

from pathlib import Path

import pytest

from mini import UPSTREAM, git, make_repository, run, write_tree
from upstream_tests import __main__ as cli

TESTS = """
import time
from pathlib import Path
import pytest
import torch
import torch.distributed as dist

def rank():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()

def test_sum():
    x = torch.ones(1) * (1 + rank())
    dist.all_reduce(x)
    assert x.item() == 3

def test_fails_on_one_rank(): assert rank() == 0, "only here"
def test_runs_after_a_failure(): test_sum()
def test_hangs_on_one_rank(): rank() == 0 or time.sleep(1000)
def test_runs_after_a_hang(): test_sum()
def test_is_skipped_on_one_rank(): rank() == 0 or pytest.skip()
def test_is_skipped(): pytest.skip()
def test_lost(): assert "a_3" in Path("megatron/core/a.py").read_text()
"""
PASSED = ["sum", "runs_after_a_failure", "runs_after_a_hang", "is_skipped_on_one_rank", "lost"]
FILE = "tests/unit_tests/test_hyper_comm_grid.py"
EXPECTED = dict.fromkeys(PASSED, "passed") | {
    "fails_on_one_rank": "failed",
    "hangs_on_one_rank": "hung",
    "is_skipped": "skipped",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A git checkout of a made-up upstream with one selected test file, of two ranks."""
    names = ("tests/__init__.py", "tests/unit_tests/__init__.py", "megatron/training.py")
    empty = dict.fromkeys((*names, "tests/unit_tests/test_utilities.py"), "")
    core = {
        "parallel_state": "def destroy_model_parallel(): pass\n",
        "transformer/torch_norm": "WrappedTorchNorm = None\n",
        "models/vision/clip_vit_model": "class CLIPViTModel:\n  def __init__(self, norm=0): ...\n",
    }
    state = {f"megatron/core/{name}.py": text for name, text in core.items()}
    make_repository(tmp_path / "tree", UPSTREAM | empty | state | {FILE: TESTS})
    monkeypatch.setenv("UPSTREAM_TEST_LIMIT_S", "10")
    return tmp_path / "tree"


def test_outcomes_and_what_is_lost(world, checkout, monkeypatch):
    seen, outcomes = [], cli.outcomes
    monkeypatch.setattr(cli, "outcomes", lambda *args: seen.append(outcomes(*args)) or seen[-1])
    found = run("--root", world.root, checkout, "--worlds", "2", program=cli.main)
    assert found.code == 1, found
    counts = "4 passed, 1 failed, 1 hung, 1 skipped"
    assert found.out[0] == "pristine, 2 ranks: " + counts.replace("4", "5")
    assert found.out[1] == "applied, 2 ranks: " + counts.replace("1 failed", "2 failed")
    (lost,) = found.out[2:]
    assert lost.startswith(f"LOST: 2 ranks, {FILE}::test_lost:")
    pristine = {test.partition("::test_")[2]: one for (_, test), (one, _) in seen[0].items()}
    assert pristine == EXPECTED


def test_refusals_have_their_exit_code(world, checkout, tmp_path):
    at = lambda *args: run("--root", world.root, *args, program=cli.main)  # noqa: E731
    assert at(tmp_path / "none").code == 3 and at(checkout, "--branch", "none").code == 3
    assert at(checkout, "--only", "none").code == 2
    write_tree(checkout, {"megatron/core/a.py": "edited\n"})
    git(checkout, "commit", "-qam", "an edit")
    found = at(checkout)
    assert found.code == 4 and "megatron/core/a.py differs from the lock" in found.errors[0]
