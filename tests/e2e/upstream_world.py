# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of upstream's git checkouts, which have scripts that the PyPI package lacks, and runs of
these scripts on one tree, each on CPU ranks of its own."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHIVES = REPOSITORY.parent / "shared/upstream"
sys.path.insert(0, str(REPOSITORY / "tools"))

from upstream_tests.trees import apply, clone  # noqa: E402

PROGRAM = Path(__file__).parent / "upstream_scripts/world.py"
Scalars = dict[str, list[tuple[int, float]]]


def put_pristine(tree: Path) -> bool:
    """Put the pristine files at `tree`; return False if there are none.

    They come from ``MEGATRON_GIT_CHECKOUT``, or else from the pin's package and an archive of what
    a checkout has beside it, in ``../shared/upstream``.
    """
    given = os.environ.get("MEGATRON_GIT_CHECKOUT")
    archives = sorted(ARCHIVES.glob("*-beside-the-package.tgz"))
    if given:
        clone(Path(given), tree)
    elif archives:
        subprocess.run([REPOSITORY / "tools/fetch_upstream.sh", tree], check=True)
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(tree, filter="data")
    return bool(given or archives)


def put_applied(pristine: Path, tree: Path) -> None:
    """Put a copy of `pristine` with the overlay at `tree`, or else the checkout's staged branch."""
    if branch := os.environ.get("STAGED_BRANCH"):
        clone(Path(os.environ["MEGATRON_GIT_CHECKOUT"]), tree, branch)
        return
    apply(REPOSITORY, shutil.copytree(pristine, tree, ignore=shutil.ignore_patterns(".git")))


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
