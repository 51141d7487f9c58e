# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Words, failures and signals of a Slurm training job, whose commands only pretend."""

import os
import subprocess

import pytest

from mini import REPOSITORY

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(REPOSITORY)}


SIGNALLED = """
if [ "$SIGNALLED" ]; then
    kill -USR1 $PPID
    until [ -e stop ]; do sleep 0.1; done
fi
exit $CODE"""


class Job:
    """A job whose ranks end with a code, or when they get the signal that Slurm then sends to the
    script. Slurm's commands note their words in `calls`."""

    def __init__(self, directory) -> None:
        self.directory, self.run, self.checkout = directory, directory / "run", directory / "tree"
        (self.checkout / "examples/mimo/nemotron_vlm").mkdir(parents=True)
        for name, does in (("srun", SIGNALLED), ("scancel", "touch stop"), ("scontrol", "")):
            path = directory / name
            path.write_text(f'#!/bin/sh\ncd {directory}; echo "{name} $*" >> calls\n{does}\n')
            path.chmod(0o755)

    def end(self, *arguments: object, code: int = 0, **environment: str) -> tuple[int, str]:
        """Return the exit code of the script, and what it says."""
        own = {"PATH": f"{self.directory}:/usr/bin:/bin", "CHECKOUT": str(self.checkout)}
        done = subprocess.run(
            [REPOSITORY / "tools/slurm/train.sbatch", self.run, *map(str, arguments)],
            env=os.environ | own | SLURM | {"CODE": str(code)} | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def calls(self) -> str:
        return (self.directory / "calls").read_text()


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


def test_it_places_all_files_of_the_run_and_passes_a_container_on(job):
    image = {"CONTAINER_IMAGE": "image.sqsh", "CONTAINER_MOUNTS": "/data:/data"}
    code, said = job.end("--train-iters", 5, RANKS_PER_NODE="8", **image)
    assert code == 0, said
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
    assert job.end(CHECKOUT="/nowhere") == (
        2,
        "error: /nowhere is no checkout with the overlay: set CHECKOUT\n",
    )


def test_a_failed_run_is_requeued_until_it_has_failed_too_often_without_a_new_checkpoint(job):
    def ends_with(restarts: int, says: str = "failed with 5, ", **limit: str) -> int:
        code, said = job.end(code=5, SLURM_RESTART_COUNT=str(restarts), **limit)
        wanted = "the job is requeued" if code == 0 else "the job is not requeued"
        assert says in said and wanted in said
        return code

    assert ends_with(0, "ended with 5, and no checkpoint is in ") == 5
    saved = job.run / "checkpoints" / "latest_checkpointed_iteration.txt"
    saved.parent.mkdir(parents=True)
    saved.write_text("12")
    assert [ends_with(restarts) for restarts in range(4)] == [0, 0, 0, 5]
    assert ends_with(4, MAX_FAILURES="9") == 0
    later = saved.stat().st_mtime + 100
    os.utime(saved, (later, later))
    assert ends_with(5) == 0, "a new checkpoint begins the count anew"
    os.utime(saved, (later - 200, later - 200))
    assert ends_with(6) == 0 and ends_with(0) == 0, "so does a new job"
    assert (job.run / "failures").read_text() == "5\n"
    assert job.calls.count("scontrol requeue 7") == 7


def test_signalled_it_passes_the_signal_on_and_is_requeued_with_what_was_saved(job):
    code, said = job.end(SIGNALLED="1")
    assert code == 1 and said.startswith("error: ended with 0, and no checkpoint is in")
    saved = job.run / "checkpoints" / "latest_checkpointed_iteration.txt"
    saved.parent.mkdir(parents=True)
    saved.write_text("12")
    (job.directory / "stop").unlink()
    code, said = job.end(SIGNALLED="1")
    assert code == 0 and said.startswith("signalled: the job is requeued, and goes on from"), said
    assert job.calls.count("scancel --signal=USR1 7") == 2
    assert job.calls.count("scontrol requeue 7") == 1
