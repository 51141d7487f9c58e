# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The script of a Slurm training job, with commands of Slurm's that only pretend."""

import os
import signal
import subprocess

import pytest

from mini import REPOSITORY
from tests.e2e.launch import wait_until

COMMANDS = {
    "srun": 'while [ -e going ]; do sleep 0.1; done; exit "$(cat code)"',
    "scancel": "rm going",
    "scontrol": ":",
}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(REPOSITORY)}


class Job:
    """A job whose ranks end with `code` once the file `going` is gone."""

    def __init__(self, directory) -> None:
        self.directory, self.run, self.checkout = directory, directory / "run", directory / "tree"
        self.saved = self.run / "checkpoints" / "latest_checkpointed_iteration.txt"
        (self.checkout / "examples/mimo/nemotron_vlm").mkdir(parents=True)
        for name, text in COMMANDS.items():
            path = directory / name
            path.write_text(f'#!/bin/sh\ncd {directory}\necho "{name} $*" >> calls\n{text}\n')
            path.chmod(0o755)

    def start(self, *arguments: object, code: int = 0, **environment: str) -> subprocess.Popen:
        (self.directory / "code").write_text(str(code))
        defaults = {"PATH": f"{self.directory}:/usr/bin:/bin", "CHECKOUT": str(self.checkout)}
        return subprocess.Popen(
            [REPOSITORY / "tools/slurm/train.sbatch", *map(str, arguments)],
            env=os.environ | defaults | SLURM | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def save(self) -> None:
        self.saved.parent.mkdir(parents=True)
        self.saved.write_text("12")

    @property
    def calls(self) -> str:
        return (self.directory / "calls").read_text()


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


def test_it_places_all_files_of_the_run_and_passes_a_container_on(job):
    image = {"CONTAINER_IMAGE": "image.sqsh", "CONTAINER_MOUNTS": "/data:/data"}
    process = job.start(job.run, "--train-iters", 5, RANKS_PER_NODE="8", **image)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    mounts = f"{job.checkout}:{job.checkout},{job.run}:{job.run},/data:/data"
    for words in (
        f"--train-iters 5 --metrics-out {job.run}/metrics.jsonl",
        f"--save {job.run}/checkpoints --load {job.run}/checkpoints",
        "--exit-signal-handler --exit-signal SIGUSR1",
        f"--container-image=image.sqsh --container-workdir={job.checkout} ",
        f" --container-mounts={mounts}",
        "--nnodes 2 --nproc-per-node 8",
    ):
        assert words in job.calls
    assert "scontrol" not in job.calls


@pytest.mark.parametrize(
    ("code", "ends_with", "says"),
    [
        (3, 0, "failed with 3, 1 times since the last checkpoint: the job is requeued"),
        (0, 1, "error: ended with 0, and no checkpoint is in"),
    ],
)
def test_signalled_it_passes_the_signal_on_and_is_requeued_with_what_was_saved(
    job, code, ends_with, says
):
    if code:
        job.save()
    (job.directory / "going").touch()
    process = job.start(job.run, code=code)
    wait_until(lambda: (job.directory / "calls").exists(), 300)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == ends_with, output
    assert says in output
    requeued = ["scontrol requeue 7"] if ends_with == 0 else []
    assert job.calls.splitlines()[1:] == ["scancel --signal=USR1 7", *requeued]


def test_a_failed_run_is_requeued_until_it_has_failed_too_often_without_a_new_checkpoint(job):
    job.save()
    saved = job.saved

    def ends_with(restarts: int, **limit: str) -> int:
        process = job.start(job.run, code=5, SLURM_RESTART_COUNT=str(restarts), **limit)
        output, _ = process.communicate(timeout=300)
        wanted = "the job is requeued" if process.returncode == 0 else "the job is not requeued"
        assert "failed with 5, " in output and wanted in output
        return process.returncode

    assert [ends_with(restarts) for restarts in range(4)] == [0, 0, 0, 5]
    assert ends_with(4, MAX_FAILURES="9") == 0
    later = saved.stat().st_mtime + 100
    os.utime(saved, (later, later))
    assert ends_with(5) == 0, "a new checkpoint begins the count anew"
    os.utime(saved, (later - 200, later - 200))
    assert ends_with(6) == 0 and ends_with(0) == 0, "so does a new job"
    assert (job.run / "failures").read_text() == "5\n"
    assert job.calls.count("scontrol requeue 7") == 7


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"SLURM_JOB_ID": ""}, "usage: sbatch"),
        ({"CHECKOUT": "/nowhere"}, "error: /nowhere is no checkout with the overlay"),
    ],
)
def test_usage(job, environment, says):
    output, _ = (process := job.start("run", **environment)).communicate()
    assert process.returncode == 2 and output.startswith(says)
    assert not (job.directory / "calls").exists()
