# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rows in a Slurm job, with an srun and a program that only pretend."""

import os
import re
import subprocess
import sys

import pytest

from examples.mimo.nemotron_vlm.options.arguments import parse
from mini import REPOSITORY, write_tree
from tests.slurm import rows_on_nodes
from tests.slurm.rows_on_nodes import Allocation, Batch, rows
from tests.unit_tests.examples.nemotron_vlm.loop.models import MODELS
from tests.unit_tests.examples.nemotron_vlm.loop.rows import APART, Row
from tests.unit_tests.examples.nemotron_vlm.loop.rows_on_gpus import COMPARED_WITH

SRUN = """#!/bin/sh
echo "$@" >> "{calls}"
while [ "$1" != timeout ]; do shift; done
exec "$@"
"""

# Takes the steps that it is asked for; the last option of a row says what else it does.
PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
print("the program says something")
loss = 2.002 if "--other-losses" in sys.argv else 2.0
time.sleep(20 * ("--sleeps" in sys.argv))
last, count = int(options["--train-iters"]), int(options.get("--exit-interval", 99))
state = pathlib.Path(options.get("--load", "/nowhere"))
first = int(state.read_text()) if state.exists() else 0
with open(options["--metrics-out"], "w") as file:
    for step in range(first + 1, min(first + count, last) + 1):
        record = dict(step=step, loss=loss, grad_norm=1.0, num_tokens=9, skipped=False)
        print(json.dumps(record), file=file)
if "--save" in options:
    pathlib.Path(options["--save"]).write_text(str(step))
sys.exit(3 * ("--fails" in sys.argv))
"""

LAYOUT = Row(4, "tiny", "dp=4", "cp=2,dp=2")
GOES_ON = Row(4, "tiny", "dp=4", "dp=4", then=(("tp=4", "tp=4", ()), ("dp=2", "pp=2", APART)))


class Job:
    """A job of two nodes."""

    def __init__(self, directory, monkeypatch) -> None:
        self.out, self.calls = directory / "out", directory / "calls"
        program = {"bin/srun": SRUN.format(calls=self.calls), "python": PROGRAM}
        write_tree(directory, program)
        for name in program:
            (directory / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("PYTHON", str(directory / "python"))
        monkeypatch.setattr(rows_on_nodes, "LIMIT_S", {"cpu": 3, "cuda": 3})

    def compare(self, row: Row, *_, gpus: int = 0) -> dict:
        """Compare a row in a job that has just started, or was requeued."""
        return Batch(Allocation("7", 2, gpus), self.out).compare(row)

    def launched(self) -> list[tuple[str, ...]]:
        """Nodes, and ranks on each, of the runs that srun has started since the last call."""
        calls = self.calls.read_text() if self.calls.exists() else ""
        self.calls.unlink(missing_ok=True)
        return re.findall(r"--nodes (\d).*--nproc-per-node (\d)", calls)


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    return Job(tmp_path, monkeypatch)


def with_option(option: str) -> Row:
    return Row(4, "tiny", "dp=4", "cp=2,dp=2", (option,))


def test_rows_run_on_as_many_nodes_as_divide_their_ranks_and_go_on_from_checkpoints(job):
    result = job.compare(LAYOUT)
    assert result["found"] == {"loss": 0, "grad_norm": 0}
    assert result["allowed"] == {"loss": 1e-4, "grad_norm": 1e-4}
    assert job.launched() == [("1", "1"), ("2", "2")]
    assert job.compare(Row(3, "24 samples", "dp=3", "dp=3"))
    assert job.launched() == [("1", "1"), ("1", "3")]
    assert job.compare(GOES_ON)["found"]["loss"] == 0
    assert "--placement non-colocated" in job.calls.read_text()
    assert len(job.launched()) == 4
    with pytest.raises(pytest.skip.Exception, match="needs 4 GPUs a node, the job has 2"):
        job.compare(Row(8, "engine", "dp=8", "dp=8"), gpus=2)


@pytest.mark.parametrize(
    ("option", "messages"),
    [
        ("--fails", ["exit code 3", "the program says something"]),
        ("--sleeps", ["took longer than 3 s"]),
    ],
)
def test_a_run_that_fails_is_named_and_a_requeued_job_keeps_those_that_have_ended(
    job, option, messages
):
    for runs in (2, 1):
        with pytest.raises(pytest.fail.Exception) as failure:
            job.compare(with_option(option))
        assert all(message in str(failure.value) for message in messages)
        assert len(job.launched()) == runs
    assert job.compare(LAYOUT) and len(job.launched()) == 1
    assert job.compare(LAYOUT) and job.launched() == []


def test_other_losses_fail_the_row(job):
    row = with_option("--other-losses")
    with pytest.raises(AssertionError, match="loss: .*'found'"):
        rows_on_nodes.test_row(job, row, lambda name, value: None)


def test_the_resources_are_what_slurm_says_and_a_container_is_passed_on(job, monkeypatch):
    (job.out / "Megatron-LM").mkdir(parents=True)
    assert Batch(Allocation(), job.out).compare(LAYOUT)["found"]["loss"] == 0
    assert job.launched() == []  # without a job, no srun
    for name, value in (("JOB_ID", "7"), ("JOB_NUM_NODES", "2"), ("GPUS_ON_NODE", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert Allocation.read() == Allocation("7", 2, 4)
    monkeypatch.setenv("CONTAINER_IMAGE", "image.sqsh")
    monkeypatch.setenv("CONTAINER_MOUNTS", "/data:/data")
    job.compare(GOES_ON)
    wanted = (
        f"--container-image=image.sqsh --container-mounts={job.out}:{job.out},/data:/data "
        f"--container-workdir={job.out}/Megatron-LM"
    )
    assert wanted in job.calls.read_text()


def test_the_program_takes_every_row(tmp_path):
    """The rows of CPU ranks have tests that run them."""
    found = [row for group in rows("cuda").values() for row in group]
    assert {row.ranks for row in found} == {1, 2, 4, 8}
    for row in {*found, *COMPARED_WITH.values()}:
        for command in row.commands:
            assert parse([*command, "--device", "cuda"], row.ranks).layouts, row
    for row in [row for group in rows("cpu").values() for row in group]:
        assert MODELS[row.model].source is None and "{" not in str(row.commands)


@pytest.mark.parametrize(
    ("folder", "arguments", "says"),
    [
        (REPOSITORY, [], "usage: e2e_batch.sh OUT"),
        (REPOSITORY, ["--once"], "usage: e2e_batch.sh OUT"),
        ("/", ["out"], "error: / is not the repository: submit from there"),
    ],
)
def test_usage(folder, arguments, says):
    script = [REPOSITORY / "tools/slurm/e2e_batch.sh", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True, env=kept)
    assert (done.returncode, done.stderr[: len(says)]) == (2, says)
