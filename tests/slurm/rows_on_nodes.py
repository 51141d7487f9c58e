# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows as runs of the training program: on the nodes of a Slurm job, or else on this host.

`tools/slurm/e2e_batch.sh` runs this file with pytest. Each run has a torchrun of its own, and must
have the losses and gradient norms of the same model on one rank.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.gpu.run import WITHOUT_TF32
from tests.unit_tests.examples.nemotron_vlm.loop.models import MODELS
from tests.unit_tests.examples.nemotron_vlm.loop.rows import ON_CPUS, Row
from tests.unit_tests.examples.nemotron_vlm.loop.rows_on_gpus import (
    AHEAD,
    AT_SCALE,
    COMPARED_WITH,
    ON_ONE_GPU,
    ON_TWO_GPUS,
)
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import (
    FIGURES,
    check,
    judged,
    steps_of,
)
from tests.unit_tests.examples.nemotron_vlm.runs import SHORT_RUN, STEPS
from tests.unit_tests.test_utilities import HAVE_CUDA

PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
LIMIT_S = {"cpu": 240, "cuda": 600}
"""Time limit of a run."""
KILL_AFTER_S = 40
"""Seconds that torchrun has to end its ranks after the limit; its own limit is 30 s."""
LOG_LINES = 60
"""Last lines of a failed run's log that its report includes."""


@dataclass(frozen=True)
class Allocation:
    """The resources of the job, or of this host: `gpus` on each node. A job has a number."""

    job: str = ""
    nodes: int = 1
    gpus: int = 0

    @classmethod
    def read(cls) -> "Allocation":
        """Read what Slurm says of its job; without one, look for the GPUs of this host."""
        if job := os.environ.get("SLURM_JOB_ID"):
            gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
            return cls(job, int(os.environ["SLURM_JOB_NUM_NODES"]), gpus)
        return cls(gpus=torch.cuda.device_count() if HAVE_CUDA else 0)

    @property
    def device(self) -> str:
        """The device of all ranks."""
        return "cuda" if self.gpus else "cpu"

    def nodes_for(self, ranks: int) -> int:
        """Return the largest number of nodes that divides the ranks."""
        return max(n for n in range(1, self.nodes + 1) if ranks % n == 0)


def rows(device: str) -> dict[str, list[Row]]:
    """Return the rows of a device by what they show.

    They are those that a command line describes and that have a tolerance of their own: samples
    come from an option, and are in no data set that would have to be made first.
    """
    groups = ON_CPUS
    if device == "cuda":
        groups = defaultdict(list)
        for row in (*ON_ONE_GPU, *ON_TWO_GPUS, *AHEAD, *AT_SCALE):
            groups[f"{row.model} on {row.ranks} GPUs"].append(row)
    chosen = {
        group: [
            row
            for row in found
            if (model := MODELS[row.model]).source is None
            and model.tolerance
            and "{shards}" not in " ".join(model.options)
        ]
        for group, found in groups.items()
    }
    return {group: found for group, found in chosen.items() if found}


def name_of(text: str) -> str:
    """Return a short name for a folder, which no other text has."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^a-z0-9=,]+', '-', text.lower())[:80]}-{digest}"


class Batch:
    """Runs of the program in an allocation, below `out`, a folder that all nodes see."""

    def __init__(self, allocation: Allocation, out: Path) -> None:
        self.allocation, self.out = allocation, out
        self.checkout = Path(os.environ.get("CHECKOUT", out / "Megatron-LM"))
        self.records = functools.cache(self._records)

    def compare(self, row: Row, *_) -> dict[str, dict[str, float]]:
        """Run a row and the run that it must equal; return found and allowed differences."""
        model, count, steps = MODELS[row.model], len(row.layouts), steps_of(row)
        reference = self._reference(row, steps)
        found: list[dict] = []
        for number, command in enumerate(row.commands):
            saved = self.out / "runs" / f"{name_of(str(row))}-checkpoints"
            if row.then:
                goes_on = ("--save", str(saved), "--load", str(saved))
                command += (*goes_on, "--exit-interval", str(steps // count))
            name = name_of(f"{row}-{number}" if row.then else str(row))
            found += self.records(name, row.ranks, command, steps)
        result = judged(model, found, reference)
        if self.allocation.device == "cuda":
            result["allowed"] = dict.fromkeys(FIGURES, model.tolerance)
        return result

    def _reference(self, row: Row, steps: int) -> list[dict]:
        """Return the records of a row's model on one rank, or in the layout of `COMPARED_WITH`."""
        if other := COMPARED_WITH.get(row.model):
            return self.records(name_of(f"{other}"), other.ranks, other.commands[0], steps)
        model = MODELS[row.model]
        alone = (*model.options, *row.common, *model.batch(2, 1))
        return self.records(name_of(f"one-rank {' '.join(alone)}-{steps}"), 1, alone, steps)

    def _records(self, name: str, ranks: int, options: tuple[str, ...], steps: int) -> list[dict]:
        """Return the records of a run, which runs unless an earlier start of the job ended it."""
        per_node = ranks // self.allocation.nodes_for(ranks)
        if self.allocation.gpus and per_node > self.allocation.gpus:
            pytest.skip(f"needs {per_node} GPUs a node, the job has {self.allocation.gpus}")
        folder = self.out / "runs" / name
        recorded, whole = folder / "recorded.jsonl", folder / "metrics.jsonl"
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            # Decay goes on as in a run of all steps.
            length = ("--train-iters", str(steps), "--lr-decay-iters", str(STEPS))
            line = (*SHORT_RUN, *length, *options, "--device", self.allocation.device)
            line += ("--metrics-out", str(recorded), "--log-file", "-")
            if wrong := self._launch(name, ranks, line, folder / "log.txt"):
                log = (folder / "log.txt").read_text(errors="replace").splitlines()
                tail = "\n".join(log[-LOG_LINES:])
                pytest.fail(f"{name}: {wrong}; the end of {folder}/log.txt:\n{tail}", pytrace=False)
            recorded.replace(whole)
        return [json.loads(line) for line in whole.read_text().splitlines()]

    def _launch(self, name: str, ranks: int, line: tuple[str, ...], log: Path) -> str:
        """Start the ranks and wait for them; return what went wrong, or an empty text."""
        limit_s = LIMIT_S[self.allocation.device]
        more = WITHOUT_TF32 if self.allocation.gpus else {"OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            code = subprocess.run(
                self._command(name, ranks, line, limit_s),
                cwd=None if self.allocation.job else self.checkout,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | more,
            ).returncode
        if code in (124, 137):
            return f"took longer than {limit_s} s"
        return f"exit code {code}" if code else ""

    def _command(self, name: str, ranks: int, line: tuple[str, ...], limit_s: int) -> list[str]:
        nodes = self.allocation.nodes_for(ranks)
        start, host, python = [], "localhost", sys.executable
        if self.allocation.job:
            host = socket.gethostname()
            start += ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", 1]
            start += ["--cpu-bind=none", "--kill-on-bad-exit=1", "--label", "--job-name", name]
            start += ["--chdir", self.checkout]
        if image := os.environ.get("CONTAINER_IMAGE"):
            python, more = "python3", os.environ.get("CONTAINER_MOUNTS")
            mounts = ",".join(filter(None, (f"{self.out}:{self.out}", more)))
            start += [f"--container-image={image}", f"--container-mounts={mounts}"]
            start += [f"--container-workdir={self.checkout}"]
        start += ["timeout", f"--kill-after={KILL_AFTER_S}", limit_s]
        start += [os.environ.get("PYTHON", python), "-m", "torch.distributed.run"]
        start += ["--nnodes", nodes, "--nproc-per-node", ranks // nodes, "--rdzv-backend", "c10d"]
        start += ["--rdzv-endpoint", f"{host}:{_free_port()}", "--rdzv-id", name, PROGRAM]
        return [str(part) for part in (*start, *line)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


HERE = Allocation.read()


@pytest.fixture(scope="session")
def batch() -> Batch:
    return Batch(HERE, Path(os.environ["OUT"]))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=pytest.mark.shows(group))
        for group, found in rows(HERE.device).items()
        for row in found
    ],
)
def test_row(batch, row, record_property):
    check(row, record_property, compare=batch.compare)
