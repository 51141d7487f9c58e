# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run goes on with the other version of Megatron-LM: the lock's release, and its next one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import REPOSITORY
from tests.e2e.test_faults import losses

RELEASE, NEXT = (REPOSITORY / "build" / name for name in ("Megatron-LM", "next"))

ARGUMENTS = ("--train-iters", "4", "--save-interval", "2", "--seed", "1", "--encoder", "dp=2")
ARGUMENTS += ("--language", "tp=2", "--global-batch-size", "8", "--micro-batch-size", "4")

LIMIT_S = 900


@pytest.mark.skipif(not (NEXT / "megatron").is_dir(), reason="build/next is not there")
@pytest.mark.parametrize("saved", [RELEASE, NEXT], ids=["to-next", "to-release"])
def test_goes_on_with_the_other_version(saved, tmp_path):
    whole, again, checkpoints = (tmp_path / name for name in ("whole", "again", "checkpoints"))
    train(saved, whole, "--save", checkpoints)
    other = NEXT if saved == RELEASE else RELEASE
    train(other, again, "--load", checkpoints, "--ckpt-step", "2")
    expected = losses(whole / "metrics.jsonl")
    found = losses(again / "metrics.jsonl")
    assert list(found) == [3, 4]
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-6)


def train(checkout: Path, directory: Path, *arguments: str | Path) -> None:
    """Train on two ranks of a checkout of Megatron-LM to the end."""
    line = (*ARGUMENTS, "--metrics-out", directory / "metrics.jsonl", *arguments)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "examples/mimo/pretrain_nemotron_vlm.py", *map(str, line)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
