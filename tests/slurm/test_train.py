# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A training run that Slurm interrupts ends with the losses of one that it leaves alone."""

import json
import re

from tests.slurm.cluster import wait_until

STEPS = 60
SAVE_INTERVAL = 10
ARGUMENTS = (
    *("--encoder", "tp=2", "--language", "ep=2"),
    *("--global-batch-size", "16", "--train-iters", STEPS, "--save-interval", SAVE_INTERVAL),
)


def submit(cluster, run) -> str:
    """Start a training on two nodes, a rank on each."""
    output = ("--output", f"{run}.log")
    job = (*output, "tools/slurm/train.sbatch", run, *ARGUMENTS)
    return cluster.submit(*job, RANKS_PER_NODE="1", OMP_NUM_THREADS="1")


def records(run) -> list[tuple]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"], line["num_tokens"]) for line in lines]


def wait_for_step(run, step: int) -> None:
    path = run / "metrics.jsonl"
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= step, 120)


class TestRequeue:
    def test_signalled_and_requeued_equals_the_uninterrupted_run(self, cluster, tmp_path):
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        assert cluster.wait(submit(cluster, whole), 240)["JobState"] == "COMPLETED"

        job = submit(cluster, cut)
        wait_for_step(cut, 3)
        cluster.call(
            "scancel", "--batch", "--signal=USR1", job
        )  # what --signal does near the limit
        wait_until(lambda: cluster.state(job)["Restarts"] == "1", 120)
        saved = int((cut / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        assert 3 <= saved < STEPS and saved % SAVE_INTERVAL, "the signal led to no checkpoint"
        wait_for_step(cut, saved + SAVE_INTERVAL + 2)
        cluster.call("scontrol", "requeue", job)  # what Slurm does when a node is lost
        wait_until(lambda: cluster.state(job)["Restarts"] == "2", 120)
        state = cluster.wait(job, 240)

        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2")
        assert records(cut) == records(whole)
        assert [record[0] for record in records(cut)] == list(range(1, STEPS + 1))

    def test_a_failed_run_is_not_requeued(self, cluster, tmp_path):
        run = tmp_path / "run"
        bad = ("--output", f"{run}.log", "tools/slurm/train.sbatch", run, "--language", "tp=3")
        state = cluster.wait(cluster.submit(*bad, RANKS_PER_NODE="1"), 120)
        assert (state["JobState"], state["Restarts"]) == ("FAILED", "0")
        assert re.search(r"error: .*tp=3", (tmp_path / "run.log").read_text())
