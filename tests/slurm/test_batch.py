# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The end-to-end cases as a Slurm job: with a planted failure, requeued, and green."""

import sys
from xml.etree import ElementTree

from tests.e2e.launch import wait_until

ROWS = ("-k", "own-defaults and not placement")
"""Three rows in colocated layouts of 8 and 4 ranks, which equal the same run on one rank."""
PLANTED = ("tp=2,dp=2", "tp=4,dp=1")
"""Layouts of the encoder and the language model."""
ENDS_IN_S = 900


def submit(cluster, out, **environment) -> str:
    output = ("--output", f"{out}.log")
    return cluster.submit(*output, "tools/slurm/e2e_batch.sh", out, *ROWS, **environment)


def failures(out) -> dict[str, str]:
    """Messages of the failed rows of the JUnit file, by name."""
    cases = ElementTree.parse(out / "junit.xml").iter("testcase")
    found = {case.attrib["name"]: case.find("failure") for case in cases}
    assert len(found) == 3
    return {name: each.attrib["message"] for name, each in found.items() if each is not None}


class TestBatch:
    def test_a_planted_failure_shows_as_one_and_a_requeued_job_goes_on(self, cluster, tmp_path):
        """The planted run learns faster: it ends well, with losses unlike the reference's."""
        out, python = tmp_path / "out", tmp_path / "python"
        layouts = "--encoder {} --language {}".format(*PLANTED)
        plant = f'case "$*" in *"{layouts}"*) set -- "$@" --lr 4e-3;; esac'
        python.write_text(f'#!/bin/sh\n{plant}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        job = submit(cluster, out, PYTHON=str(python))
        wait_until(lambda: list(out.glob("runs/*/metrics.jsonl")), ENDS_IN_S)
        (first,) = out.glob("runs/*/metrics.jsonl")
        ended = first.stat().st_mtime_ns
        cluster.call("scontrol", "requeue", job)

        state = cluster.wait(job, ENDS_IN_S)
        assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "1:0", "1")
        (name,) = failures(out)
        assert name.endswith(f"{'-'.join(PLANTED)}]")
        assert "loss: " in failures(out)[name]
        assert first.stat().st_mtime_ns == ended
        assert "1 failed, 2 passed" in out.with_suffix(".log").read_text()

    def test_all_rows_pass(self, cluster, tmp_path):
        state = cluster.wait(submit(cluster, tmp_path / "out"), ENDS_IN_S)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0")
        assert failures(tmp_path / "out") == {}
