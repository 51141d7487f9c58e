# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The batch of end-to-end cases as a Slurm job: with a planted failure, requeued, and green."""

from xml.etree import ElementTree

import pytest

from tests.slurm.cluster import REPOSITORY, wait_until

CASES = REPOSITORY / "tools" / "slurm" / "cases.toml"
PLANTED = "fan-out"
WHOLE_LIST_S = 1500


def submit(cluster, out, *options) -> str:
    output = ("--output", f"{out}.log")
    return cluster.submit(*output, "tools/slurm/e2e_batch.sh", out, *options)


def failures(out) -> dict[str, str]:
    """Messages of the failed cases of the JUnit file, by name."""
    suite = ElementTree.parse(out / "junit.xml").getroot()
    assert len(suite) == int(suite.attrib["tests"])
    found = {case.attrib["name"]: case.find("failure") for case in suite}
    return {
        name: failure.attrib["message"] for name, failure in found.items() if failure is not None
    }


def listed(cluster) -> list[str]:
    lines = cluster.call("tools/slurm/e2e_batch.sh", "--list", "--device", "cpu").splitlines()
    return [line.partition(":")[0] for line in lines]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The output directory of both jobs."""
    return tmp_path_factory.mktemp("batch") / "out"


class TestBatch:
    def test_a_planted_failure_shows_as_one_and_a_requeued_job_goes_on(
        self, cluster, out, tmp_path
    ):
        """The planted case has another seed: it ends well, with losses unlike the reference's."""
        begin = f'case.{PLANTED} = {{ ranks = 4, arguments = "'
        assert begin in CASES.read_text()
        planted = tmp_path / "cases.toml"
        planted.write_text(CASES.read_text().replace(begin, f"{begin}--seed 7 "))
        job = submit(cluster, out, "--cases", planted)
        first = out / "cases" / "one-rank" / "result.json"
        wait_until(first.exists, 300)
        result = first.read_text()
        cluster.call("scontrol", "requeue", job)

        state = cluster.wait(job, WHOLE_LIST_S)
        assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "1:0", "1")
        assert list(failures(out)) == [PLANTED]
        assert "more than 0.0001 apart" in failures(out)[PLANTED]
        assert first.read_text() == result
        log = out.with_suffix(".log").read_text()
        assert "one-rank: passed, in an earlier run" in log
        assert f"{len(listed(cluster)) - 1} passed, 1 failed" in log

    def test_the_whole_list_is_green(self, cluster, out):
        state = cluster.wait(submit(cluster, out), WHOLE_LIST_S)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0")
        assert failures(out) == {}
        summary = (out / "summary.txt").read_text()
        assert f"{len(listed(cluster))} passed, 0 failed" in summary
