# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A training run that Slurm interrupts ends with the losses of one that it leaves alone."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.launch import wait_until
from tests.slurm.cluster import Cluster, why_not

STEPS = 30
SAVE_INTERVAL = 10
ENDS_IN_S = 600
ARGUMENTS = (
    *("--encoder", "tp=2", "--language", "ep=2"),
    *("--global-batch-size", "16", "--train-iters", STEPS, "--save-interval", SAVE_INTERVAL),
)


@pytest.fixture
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A Slurm; where there can be none, the test is skipped."""
    if reason := why_not():
        pytest.skip(reason)
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


def wait_for_step(run, step: int) -> None:
    path = run / "metrics.jsonl"
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= step, ENDS_IN_S)


def test_signalled_and_requeued_equals_the_uninterrupted_run(cluster, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cluster.wait(submit(cluster, whole), ENDS_IN_S)["JobState"] == "COMPLETED"

    job = submit(cluster, cut)
    wait_for_step(cut, 3)
    cluster.call("scancel", "--batch", "--signal=USR1", job)  # as --signal near the limit
    wait_until(lambda: cluster.state(job)["Restarts"] == "1", ENDS_IN_S)
    saved = int((cut / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < STEPS and len(records(cut)) == saved, "a step is in no checkpoint"
    assert "signalled: " in (tmp_path / "cut.log").read_text()
    wait_for_step(cut, saved + SAVE_INTERVAL + 2)
    cluster.call("scontrol", "requeue", job)  # as when a node is lost
    wait_until(lambda: cluster.state(job)["Restarts"] == "2", ENDS_IN_S)
    state = cluster.wait(job, ENDS_IN_S)

    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2")
    assert records(cut) == records(whole)
    assert [record[0] for record in records(cut)] == list(range(1, STEPS + 1))
