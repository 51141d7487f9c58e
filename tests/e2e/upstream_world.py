# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of upstream's git checkouts, which have scripts that the PyPI package lacks, and runs of
these scripts on one tree, each on CPU ranks of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "upstream_scripts/world.py"
Scalars = dict[str, list[tuple[int, float]]]


def put_pristine(tree: Path) -> bool:
    """Clone ``MEGATRON_GIT_CHECKOUT`` to `tree`; return False if it is not set."""
    given = os.environ.get("MEGATRON_GIT_CHECKOUT")
    if given:
        _clone(given, tree)
    return bool(given)


def put_applied(pristine: Path, tree: Path) -> None:
    """Put a copy of `pristine` with the overlay at `tree`, or else the checkout's staged branch."""
    if branch := os.environ.get("STAGED_BRANCH"):
        _clone(os.environ["MEGATRON_GIT_CHECKOUT"], tree, "--branch", branch)
        return
    shutil.copytree(pristine, tree, ignore=shutil.ignore_patterns(".git"))
    subprocess.run([REPOSITORY / "tools/apply_overlay.sh", tree], check=True)


def _clone(checkout: str, tree: Path, *options: str) -> None:
    subprocess.run(["git", "clone", "--quiet", *options, "--", checkout, tree], check=True)


def scalars_of(folder: Path) -> Scalars:
    """Return the values that Megatron recorded for TensorBoard, by step."""
    recorded = EventAccumulator(str(folder))
    recorded.Reload()
    return {
        tag: [(event.step, event.value) for event in recorded.Scalars(tag)]
        for tag in recorded.Tags()["scalars"]
        if not tag.endswith(" vs samples")
    }


class UpstreamWorld:
    """A process that has imported a tree's Megatron, and from which ranks are forked."""

    def __init__(self, tree: Path):
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM],
            cwd=tree,
            env=os.environ
            | {
                "PYTHONPATH": str(tree),
                "OMP_NUM_THREADS": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "PYTHONWARNINGS": "ignore",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, ranks: int, command: list[str], folder: Path) -> None:
        """Start a run and return at once; it writes below `folder`."""
        folder.mkdir(parents=True)
        self._folder = folder
        command = [*command, "--tensorboard-dir", str(folder / "tensorboard")]
        asked = {"ranks": ranks, "command": command, "log": str(folder / "log.txt")}
        print(json.dumps(asked), file=self._process.stdin, flush=True)

    def wait(self) -> tuple[int, str]:
        """Return the exit status of the run, and its ranks' output."""
        status = int(self._process.stdout.readline())
        return status, (self._folder / "log.txt").read_text()

    def scalars(self) -> Scalars:
        """Return the values that Megatron recorded in the last run."""
        return scalars_of(self._folder / "tensorboard")

    def close(self) -> None:
        """End the process; its last run has ended."""
        self._process.stdin.close()
        self._process.wait()
