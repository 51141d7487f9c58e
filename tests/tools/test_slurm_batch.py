# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The runner of end-to-end cases in a Slurm job, with an srun and a program that only pretend."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mini import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools" / "slurm"))
import e2e_batch  # noqa: E402
from e2e_cases import choose, read_cases  # noqa: E402

SRUN = """#!/bin/sh
echo "$@" >> "{calls}"
while [ "$1" != timeout ]; do shift; done
exec "$@"
"""

PROGRAM = """#!{python}
import json, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
time.sleep(float(options.get("--sleep", 0)))
print("the program says something")
losses = json.loads(options.get("--losses", "[2, 1]"))
with open(options["--metrics-out"], "w") as file:
    for step, loss in enumerate(losses, start=1):
        print(json.dumps({{"step": step, "loss": loss, "grad_norm": 1.0}}), file=file)
sys.exit(int(options.get("--exit", 0)))
"""

CASES = """
[cpu]
arguments = ""
steps = [1, 2]
limit_s = 30
tolerance = 1e-4
[gpu]
arguments = ""
steps = [1, 2]
limit_s = 30
tolerance = 1e-4
[[case]]
name = "reference"
device = "cpu"
ranks = 1
[[case]]
name = "layout"
device = "cpu"
ranks = 4
arguments = "LAYOUT"
same_as = "reference"
[[case]]
name = "loads"
device = "cpu"
ranks = 3
arguments = "--load {layout}/checkpoints"
[[case]]
name = "gpu-case"
device = "gpu"
ranks = 8
"""


class Job:
    """A job of two nodes, whose case `layout` can be changed."""

    def __init__(self, directory: Path, monkeypatch) -> None:
        self.directory, self.out = directory, directory / "out"
        self.calls = directory / "calls"
        self.python = directory / "python"
        self._write(directory / "bin" / "srun", SRUN.format(calls=self.calls))
        self._write(self.python, PROGRAM.format(python=sys.executable))
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
        monkeypatch.setattr(e2e_batch, "prepare", lambda checkout: None)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *options: str, layout: str = "") -> int:
        cases = self.directory / "cases.toml"
        cases.write_text(CASES.replace("LAYOUT", layout))
        common = ["--cases", str(cases), "--python", str(self.python)]
        return e2e_batch.main([str(self.out), *common, *options])

    def launched(self) -> list[str]:
        """Names of the cases that srun has started since the last call."""
        calls = self.calls.read_text() if self.calls.exists() else ""
        self.calls.unlink(missing_ok=True)
        return re.findall(r"--job-name (\S+)", calls)

    def suite(self) -> ElementTree.Element:
        return ElementTree.parse(self.out / "junit.xml").getroot()


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    return Job(tmp_path, monkeypatch)


class TestOutcomes:
    def test_all_pass(self, job):
        assert job.run() == 0
        assert job.launched() == ["reference", "layout", "loads"]
        assert job.suite().attrib["failures"] == "0"
        assert (job.out / "summary.txt").read_text().endswith("3 passed, 0 failed\n")
        assert "something" in (job.out / "cases" / "loads" / "log.txt").read_text()

    def test_here_no_slurm_is_asked(self, job, monkeypatch):
        """Cases that need more GPUs than the host has do not run."""
        monkeypatch.delenv("SLURM_JOB_ID")
        (job.out / "Megatron-LM").mkdir(parents=True)
        assert job.run("--here", "0") == 0
        assert job.launched() == []
        assert (job.out / "summary.txt").read_text().endswith("3 passed, 0 failed\n")
        assert job.run("--here", "4") == 1
        assert "it needs 8 GPUs a node, of 4" in (job.out / "summary.txt").read_text()
        assert job.run("--here", "8") == 0

    @pytest.mark.parametrize(
        ("layout", "message"),
        [
            ("--losses [2,1.001]", "step 2 has loss 1.001, and reference has 1: more than 0.0001"),
            ("--losses [2,null]", "step 2 has loss None, and reference has 1"),
            ("--losses [2]", "it recorded steps [1], not 1 to 2"),
            ("--exit 3", "exit code 3"),
        ],
    )
    def test_a_failure_is_named_and_what_needs_the_case_does_not_run(self, job, layout, message):
        assert job.run(layout=layout) == 1
        assert job.launched() == ["reference", "layout"]
        failures = {case.attrib["name"]: case.find("failure") for case in job.suite()}
        assert failures["reference"] is None
        assert failures["layout"].attrib["message"].startswith(message)
        assert "something" in failures["layout"].text
        assert failures["loads"].attrib["message"] == "not run: it needs layout, which failed"
        assert "1 passed, 2 failed" in (job.out / "summary.txt").read_text()

    def test_a_case_has_a_time_limit(self, job, monkeypatch):
        monkeypatch.setitem(globals(), "CASES", CASES.replace("limit_s = 30", "limit_s = 1"))
        assert job.run("--only", "layout", layout="--sleep 20") == 1
        failure = job.suite().find("testcase[@name='layout']/failure")
        assert failure.attrib["message"] == "it took longer than 1 s"

    def test_a_gpu_case_without_gpus_fails_and_says_so(self, job):
        assert job.run("--device", "gpu") == 1
        failure = job.suite().find("testcase[@name='gpu-case']/failure")
        assert failure.attrib["message"] == "not run: it needs 4 GPUs a node, of 0"
        assert job.launched() == []


class TestAgain:
    def test_a_requeued_job_runs_only_what_has_no_result(self, job):
        assert job.run(layout="--exit 3") == 1
        (job.out / "cases" / "reference" / "result.json").unlink()
        job.launched()
        assert job.run(layout="--exit 3") == 1
        assert job.launched() == ["reference"]
        assert job.suite().attrib["tests"] == "3"

    def test_another_job_repeats_what_failed(self, job, monkeypatch):
        assert job.run(layout="--exit 3") == 1
        job.launched()
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        assert job.run(layout="--exit 3") == 1
        assert job.launched() == ["layout"]

    def test_a_case_that_changed_runs_again_with_those_that_need_it(self, job):
        assert job.run() == 0
        job.launched()
        assert job.run(layout="--losses [2,1]") == 0
        assert job.launched() == ["layout", "loads"]

    def test_a_changed_overlay_runs_all_again(self, job, monkeypatch):
        assert job.run() == 0
        job.launched()
        monkeypatch.setattr(e2e_batch, "_sources_hash", lambda: "other")
        assert job.run() == 0
        assert job.launched() == ["reference", "layout", "loads"]


class TestCommandLine:
    def test_only_takes_with_it_what_is_needed(self, job):
        assert job.run("--only", "load*") == 0
        assert job.launched() == ["reference", "layout", "loads"]
        assert job.run("--only", "ref*", "--only", "layout") == 0
        assert job.suite().attrib["tests"] == "2"

    def test_list_runs_nothing(self, job, capsys):
        assert job.run("--list") == 0
        names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
        assert names == ["reference", "layout", "loads"]
        assert job.launched() == [] and not job.out.exists()

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["out", "--only", "nothing"], "--only nothing: no such cpu case"),
            ([], "OUT is missing"),
            (["out"], "this is no Slurm job"),
        ],
    )
    def test_usage(self, monkeypatch, capsys, arguments, says):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        with pytest.raises(SystemExit, match="2"):
            e2e_batch.main(arguments)
        assert says in capsys.readouterr().err

    def test_ranks_spread_evenly_over_as_many_nodes_as_divide_them(self, job):
        assert job.run() == 0
        calls = job.calls.read_text()
        shapes = re.findall(r"--nodes (\d).*--nnodes (\d) --nproc-per-node (\d)", calls)
        assert shapes == [("1", "1", "1"), ("2", "2", "2"), ("1", "1", "3")]

    def test_a_container_is_passed_on_to_srun(self, job):
        options = ("--container-image", "image.sqsh", "--container-mounts", "/data:/data")
        assert job.run(*options, "--only", "reference") == 0
        wanted = (
            f"--container-image=image.sqsh --container-mounts={job.out}:{job.out},/data:/data "
            f"--container-workdir={job.out}/Megatron-LM"
        )
        assert wanted in job.calls.read_text()


class TestCases:
    listed = read_cases(REPOSITORY / "tools" / "slurm" / "cases.toml")

    @pytest.mark.parametrize("device", ["cpu", "gpu"])
    def test_every_case_fits_eight_ranks_and_a_case_of_its_device(self, device):
        names = {case.name for case in choose(self.listed, device, [])}
        for case in choose(self.listed, device, []):
            assert case.ranks <= 8 and set(case.needs) <= names

    def test_a_case_must_come_after_what_it_needs(self, tmp_path):
        head, reference, *others = CASES.split("[[case]]")
        path = tmp_path / "cases.toml"
        path.write_text("[[case]]".join([head, *others, reference]))
        with pytest.raises(ValueError, match="layout needs reference, which must come before"):
            read_cases(path)
