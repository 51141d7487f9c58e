# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A training run that Slurm interrupts ends with the losses of one that it leaves alone.

The Slurm has two virtual nodes on this host: munged, slurmctld and two slurmd, as root.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launch import REPOSITORY, wait_until

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
IS_THERE = shutil.which("slurmctld", path=PATH) and os.geteuid() == 0
pytestmark = pytest.mark.skipif(not IS_THERE, reason="needs root; make test-slurm installs Slurm")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
StateSaveLocation={directory}
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[26818-26819] CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""A requeued job starts once credentials have expired (cred_expire), 120 s by default."""


class Cluster:
    """The daemons, and the commands of a user.

    Args:
        directory: for the daemons' files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        configuration, host = directory / "slurm.conf", socket.gethostname().partition(".")[0]
        configuration.write_text(CONFIGURATION.format(host=host, directory=directory))
        own = {"PATH": PATH, "SLURM_CONF": str(configuration), "PYTHON": sys.executable}
        self.environment = os.environ | own
        key = directory / "munge.key-file"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        version = tuple(map(int, re.findall(r"\d+", self.call("slurmd", "-V"))[:2]))
        # Jobs are in no cgroup: versions before 23.2 cannot say so, and load a plugin all the same.
        plugin = "disabled" if version >= (23, 2) else "cgroup/v1"
        (directory / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")

    def start(self) -> None:
        """Start the daemons, and wait for both nodes."""
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        self.call(
            "munged", "--force", *(f"--{name}={self.directory}/munge.{name}" for name in files)
        )
        self.call("slurmctld")
        for node in ("n1", "n2"):
            self.call("slurmd", "-N", node)
        wait_until(lambda: self.call("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], 60)

    def stop(self) -> None:
        """End all jobs, and then the daemons that run."""
        if (self.directory / "slurmctld.pid").exists():
            self.call("scancel", "--user=root")
            wait_until(lambda: not self.call("squeue", "-h"), 60)
        pids = list(self.directory.glob("*.pid*"))
        for path in pids:
            os.kill(int(path.read_text()), signal.SIGTERM)
        wait_until(lambda: not any(path.exists() for path in pids), 30)

    def call(self, *command: object, **environment: str) -> str:
        """Run a command in the repository, and return its output."""
        ended = subprocess.run(
            [str(part) for part in command],
            cwd=REPOSITORY,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def state(self, job: str) -> dict[str, str]:
        """Return the fields that ``scontrol show job`` prints."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))


STEPS = 30
SAVE_INTERVAL = 10
ENDS_IN_S = 600
ARGUMENTS = ("--encoder", "tp=2", "--language", "ep=2", "--global-batch-size", "16")
ARGUMENTS += ("--train-iters", STEPS, "--save-interval", SAVE_INTERVAL)


@pytest.fixture
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def submit(cluster, run) -> str:
    """Start a training on two nodes, a rank on each; return the job's number."""
    sbatch = ("sbatch", "--parsable", "--nodes", 2, "--output", f"{run}.log")
    job = (*sbatch, "tools/slurm/train.sbatch", run, *ARGUMENTS)
    return cluster.call(*job, RANKS_PER_NODE="1", OMP_NUM_THREADS="1").strip()


def records(run) -> list[tuple]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"], line["num_tokens"]) for line in lines]


def test_signalled_and_requeued_equals_the_uninterrupted_run(cluster, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    metrics = cut / "metrics.jsonl"

    def wait_for(job: str, **wanted: str) -> None:
        wait_until(lambda: wanted.items() <= cluster.state(job).items(), ENDS_IN_S)

    def wait_for_step(step: int) -> None:
        wait_until(lambda: metrics.exists() and len(records(cut)) >= step, ENDS_IN_S)

    wait_for(submit(cluster, whole), JobState="COMPLETED")
    job = submit(cluster, cut)
    wait_for_step(3)
    cluster.call("scancel", "--batch", "--signal=USR1", job)  # as --signal near the limit
    wait_for(job, Restarts="1")
    saved = int((cut / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < STEPS and len(records(cut)) == saved, "a step is in no checkpoint"
    assert "signalled: " in (tmp_path / "cut.log").read_text()
    wait_for_step(saved + SAVE_INTERVAL + 2)
    cluster.call("scontrol", "requeue", job)  # as when a node is lost
    wait_for(job, Restarts="2", JobState="COMPLETED")
    assert records(cut) == records(whole)
    assert [record[0] for record in records(cut)] == list(range(1, STEPS + 1))
