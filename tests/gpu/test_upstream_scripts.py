# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``pretrain_mimo.py`` on the applied tree, with experts and the engine's layers.

The script is in git checkouts only: set ``MEGATRON_GIT_CHECKOUT`` to one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_pretrain_mimo import (
    APART,
    BF16_TOLERANCE,
    CHUNKWISE,
    ONE_RANK,
    OPTIONS,
    PROGRAM,
)
from tests.e2e.upstream_world import put_applied, put_pristine, scalars_of

TOLERANCE = 1e-4
LIMIT_S = 400
GPUS = int(os.environ.get("GPUS", "2"))

needs_two = pytest.mark.skipif(GPUS < 2, reason="needs 2 ranks, this run has 1")

MIMO = f"{PROGRAM} {OPTIONS} {CHUNKWISE}"
TWO_GPUS = "--encoder-tp 1 --encoder-dp 2 --llm-tp 2 --llm-dp 1 --llm-ep 2"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A git checkout with the overlay."""
    folder = tmp_path_factory.mktemp("trees")
    if not put_pristine(folder / "pristine"):
        pytest.fail("no git checkout of Megatron-LM at hand: set MEGATRON_GIT_CHECKOUT to one")
    put_applied(folder / "pristine", folder / "applied")
    return folder / "applied"


class Script:
    """The script, on so many GPUs."""

    def __init__(self, tree: Path, ranks: int, command: str, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        program = [str(Path(__file__).with_name("upstream_script.py")), *command.split()]
        recorded = ["--tensorboard-dir", str(folder / "tensorboard")]
        with (folder / "log.txt").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *launch, *program, *recorded],
                cwd=tree,
                env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": _paths(tree)},
                stdout=log,
                stderr=log,
            )

    def curves(self) -> list[list[float]]:
        """Wait until it has ended well, and return losses and gradient norms."""
        try:
            status = self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
        assert status == 0, (self._folder / "log.txt").read_text(errors="replace")[-4000:]
        recorded = scalars_of(self._folder / "tensorboard")
        return [[value for _, value in recorded[tag]] for tag in ("lm loss", "grad-norm")]


def _paths(tree: Path) -> str:
    """Python's search path with the tree in the checkout's place."""
    own, rest = os.environ["CHECKOUT"], os.environ["PYTHONPATH"].split(os.pathsep)
    return os.pathsep.join(str(tree) if path == own else path for path in rest)


def check(
    tree, runs: list[tuple[int, str]], folder: Path, record_property, tolerance: float = TOLERANCE
) -> None:
    """Start two runs at once, and assert that losses and gradient norms are the same."""
    started = [
        Script(tree, ranks, command, folder / str(number))
        for number, (ranks, command) in enumerate(runs)
    ]
    one, other = (script.curves() for script in started)
    found = {
        name: max(abs(a / b - 1) for a, b in zip(these, those, strict=True))
        for name, these, those in zip(("loss", "grad_norm"), one, other, strict=True)
    }
    record_property("found", found)
    assert len(one[0]) == 4 and max(found.values()) <= tolerance, (found, one, other)


@needs_two
def test_pretrain_mimo_colocated_trains_on_two_gpus_as_on_one(tree, tmp_path, record_property):
    runs = [(1, f"{MIMO} {ONE_RANK}"), (2, f"{MIMO} {TWO_GPUS}")]
    check(tree, runs, tmp_path, record_property)


@needs_two
def test_pretrain_mimo_on_a_gpu_for_each_module(tree, tmp_path, record_property):
    """Two sizes of microbatches are compared: no one-GPU run has the same initial weights."""
    alike = f"{MIMO} {APART} --llm-tp 1"
    runs = [(2, alike), (2, f"{alike} --micro-batch-size 4")]
    check(tree, runs, tmp_path, record_property, BF16_TOLERANCE)
