# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The runner of end-to-end cases in a Slurm job, with an srun and a program that only pretend."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mini import REPOSITORY, write_tree

sys.path.insert(0, str(REPOSITORY / "tools" / "slurm"))
import e2e_batch  # noqa: E402
from e2e_cases import choose, read_cases  # noqa: E402

SRUN = """#!/bin/sh
echo "$@" >> "{calls}"
while [ "$1" != timeout ]; do shift; done
exec "$@"
"""

PROGRAM = f"""#!{sys.executable}
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

DEVICE = 'arguments = ""\nsteps = [1, 2]\nlimit_s = 3\ntolerance = 1e-4\n'
CASES = f"""
[cpu]
{DEVICE}
[[cpu.group]]
case.reference = {{ ranks = 1 }}
case.layout = {{ ranks = 4, arguments = "LAYOUT" }}
[[cpu.group]]
case.loads = {{ ranks = 3, arguments = "--load {{layout}}/checkpoints" }}
[gpu]
{DEVICE}
[[gpu.group]]
case.gpu-case = {{ ranks = 8 }}
"""
ALL = ["reference", "layout", "loads"]


class Job:
    """A job of two nodes, whose case `layout` can be changed."""

    def __init__(self, directory: Path, monkeypatch) -> None:
        self.directory, self.out = directory, directory / "out"
        self.calls, self.python = directory / "calls", directory / "python"
        write_tree(directory, {"bin/srun": SRUN.format(calls=self.calls), "python": PROGRAM})
        for name in ("bin/srun", "python"):
            (directory / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:/usr/bin:/bin")
        for name, value in (("JOB_ID", "7"), ("JOB_NUM_NODES", "2"), ("GPUS_ON_NODE", "0")):
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setattr(e2e_batch, "prepare", lambda checkout: None)

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

    def failures(self) -> dict[str, ElementTree.Element | None]:
        """The failure of each case in the JUnit file."""
        suite = ElementTree.parse(self.out / "junit.xml").getroot()
        assert int(suite.attrib["tests"]) == len(suite)
        found = {case.attrib["name"]: case.find("failure") for case in suite}
        assert int(suite.attrib["failures"]) == sum(each is not None for each in found.values())
        return found


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    return Job(tmp_path, monkeypatch)


class TestOutcomes:
    def test_all_pass_on_as_many_nodes_as_divide_the_ranks(self, job):
        assert job.run() == 0
        shapes = re.findall(
            r"--nodes (\d).*--nnodes (\d) --nproc-per-node (\d)", job.calls.read_text()
        )
        assert shapes == [("1", "1", "1"), ("2", "2", "2"), ("1", "1", "3")]
        assert job.launched() == ALL
        assert job.failures() == dict.fromkeys(ALL)
        assert (job.out / "summary.txt").read_text().endswith("3 passed, 0 failed\n")
        assert "something" in (job.out / "cases" / "loads" / "log.txt").read_text()

    def test_here_no_slurm_is_asked(self, job, monkeypatch):
        """Cases that need more GPUs than the host has do not run."""
        monkeypatch.delenv("SLURM_JOB_ID")
        (job.out / "Megatron-LM").mkdir(parents=True)
        for gpus, code, says in (
            ("0", 0, "3 passed, 0 failed"),
            ("4", 1, "it needs 8 GPUs a node, of 4"),
            ("8", 0, "1 passed, 0 failed"),
        ):
            assert job.run("--here", gpus) == code
            assert says in (job.out / "summary.txt").read_text()
        assert job.launched() == []

    @pytest.mark.parametrize(
        ("layout", "message"),
        [
            ("--losses [2,1.001]", "step 2 has loss 1.001, and reference has 1: more than 0.0001"),
            ("--losses [2,null]", "step 2 has loss None, and reference has 1"),
            ("--losses [2]", "it recorded steps [1], not 1 to 2"),
            ("--exit 3", "exit code 3"),
            ("--sleep 20", "it took longer than 3 s"),
        ],
    )
    def test_a_failure_is_named_and_what_needs_the_case_does_not_run(self, job, layout, message):
        assert job.run(layout=layout) == 1
        assert job.launched() == ["reference", "layout"]
        failures = job.failures()
        assert failures["reference"] is None
        assert failures["layout"].attrib["message"].startswith(message)
        assert layout == "--sleep 20" or "something" in failures["layout"].text
        assert failures["loads"].attrib["message"] == "not run: it needs layout, which failed"
        assert "1 passed, 2 failed" in (job.out / "summary.txt").read_text()

    def test_a_gpu_case_without_gpus_fails_and_says_so(self, job):
        assert job.run("--device", "gpu") == 1
        message = job.failures()["gpu-case"].attrib["message"]
        assert message == "not run: it needs 4 GPUs a node, of 0"
        assert job.launched() == []


class TestAgain:
    @pytest.mark.parametrize(
        ("before", "job_id", "after", "launched"),
        [
            ("--exit 3", "7", "--exit 3", ["reference"]),  # requeued; its result is removed below
            ("--exit 3", "8", "--exit 3", ["reference", "layout"]),
            ("", "7", "--losses [2,1]", ["reference", "layout", "loads"]),
            ("", "8", "", ["reference"]),
        ],
    )
    def test_what_runs_again(self, job, monkeypatch, before, job_id, after, launched):
        """A case without a result does; in another job also what failed; and what has changed."""
        assert job.run(layout=before) == bool(before)
        (job.out / "cases" / "reference" / "result.json").unlink()
        job.launched()
        monkeypatch.setenv("SLURM_JOB_ID", job_id)
        assert job.run(layout=after) == ("--exit" in after)
        assert job.launched() == launched
        assert list(job.failures()) == ALL

    def test_a_changed_overlay_runs_all_again(self, job, monkeypatch):
        for sources in ("one", "other"):
            monkeypatch.setattr(e2e_batch, "_sources_hash", lambda sources=sources: sources)
            assert job.run() == 0
            assert job.launched() == ALL


class TestCommandLine:
    def test_only_takes_with_it_what_is_needed(self, job):
        assert job.run("--only", "load*") == 0
        assert job.launched() == ALL
        assert job.run("--only", "ref*", "--only", "layout") == 0
        assert list(job.failures()) == ["reference", "layout"]

    def test_list_runs_nothing(self, job, capsys):
        assert job.run("--list") == 0
        names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
        assert names == ALL
        assert job.launched() == [] and not job.out.exists()

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["out", "--only", "nothing"], "--only nothing: no such cpu case"),
            (["out", "--cases", str(REPOSITORY / "tools/slurm/many_gpus.toml")], "no cpu cases"),
            ([], "OUT is missing"),
            (["out"], "this is no Slurm job"),
        ],
    )
    def test_usage(self, monkeypatch, capsys, arguments, says):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        with pytest.raises(SystemExit, match="2"):
            e2e_batch.main(arguments)
        assert says in capsys.readouterr().err

    def test_a_container_is_passed_on_to_srun(self, job):
        options = ("--container-image", "image.sqsh", "--container-mounts", "/data:/data")
        assert job.run(*options, "--only", "reference") == 0
        wanted = (
            f"--container-image=image.sqsh --container-mounts={job.out}:{job.out},/data:/data "
            f"--container-workdir={job.out}/Megatron-LM"
        )
        assert wanted in job.calls.read_text()


class TestCases:
    @pytest.mark.parametrize(
        ("name", "device"), [("cases", "cpu"), ("cases", "gpu"), ("many_gpus", "gpu")]
    )
    def test_the_program_takes_every_case_and_eight_ranks_fit(self, name, device, tmp_path):
        pytest.importorskip("megatron.core.models.mimo.comm", reason="needs the applied checkout")
        from megatron.core import cpu_runtime

        cpu_runtime.install()
        from examples.mimo.nemotron_vlm.options.arguments import parse

        cases = read_cases(REPOSITORY / "tools" / "slurm" / f"{name}.toml", device)
        assert cases == choose(cases, [])
        for case in cases:
            assert case.ranks <= 8
            assert parse(case.command_line(tmp_path), case.ranks).layouts, case.name

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (("case.loads", "case.reference"), "two cases are called reference"),
            (("{layout}", "{later}"), "loads needs later, which must come before it"),
        ],
    )
    def test_a_list_that_cannot_run_is_refused(self, tmp_path, change, reason):
        path = tmp_path / "cases.toml"
        path.write_text(CASES.replace(*change))
        with pytest.raises(ValueError, match=reason):
            read_cases(path, "cpu")
