# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tool that runs upstream's own tests on both trees: outcomes, hangs, lost tests."""

from mini import UPSTREAM, make_repository, run
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

NAMES = ("tests/__init__.py", "tests/unit_tests/__init__.py", "tests/unit_tests/test_utilities.py")
IMPORTED = {
    "parallel_state": "def destroy_model_parallel(): pass\n",
    "transformer/torch_norm": "WrappedTorchNorm = None\n",
    "models/vision/clip_vit_model": "class CLIPViTModel:\n  def __init__(self, norm=0): ...\n",
}
"""Modules of Megatron's core that the tool imports, by path, with their text."""


def test_outcomes_and_what_is_lost(world, tmp_path, monkeypatch):
    """Upstream is a git checkout of one of the selected files of tests."""
    files = dict.fromkeys((*NAMES, "megatron/training.py"), "") | {FILE: TESTS}
    files |= {f"megatron/core/{name}.py": text for name, text in IMPORTED.items()}
    make_repository(tmp_path / "tree", UPSTREAM | files)
    monkeypatch.setenv("UPSTREAM_TEST_LIMIT_S", "10")
    seen, outcomes = [], cli.outcomes
    monkeypatch.setattr(cli, "outcomes", lambda *args: seen.append(outcomes(*args)) or seen[-1])
    found = run("--root", world.root, tmp_path / "tree", "--worlds", "2", program=cli.main)
    assert found.code == 1, found
    assert found.out[1] == "applied, 2 ranks: 4 passed, 2 failed, 1 hung, 1 skipped"
    (lost,) = found.out[2:]
    assert lost.startswith(f"LOST: 2 ranks, {FILE}::test_lost:")
    pristine = {test.partition("::test_")[2]: one for (_, test), (one, _) in seen[0].items()}
    assert pristine == EXPECTED
