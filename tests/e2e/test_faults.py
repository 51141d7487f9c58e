# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, stops, hangs or raises: one report, a quick end, and nothing saved is lost."""

import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.launch import CHECKOUT, kill, run, start

ENCODER, LANGUAGE = 0, 1
FAULTY = str(Path(__file__).parent / "faulty_rank.py")

FAULT_TIMEOUT_S = 30
LIMIT_S = 60
"""From the fault to the end of every rank."""

UNTIL_FAULT_S = 20
"""From the first save, which can be seen from outside, to the fault."""

AT_ONCE = 4
"""Runs under way."""

ARGUMENTS = (
    *("--placement", "non-colocated", "--steps", "6", "--save-interval", "2"),
    *("--global-batch-size", "8", "--micro-batch-size", "4"),
    *("--fault-timeout", FAULT_TIMEOUT_S),
)

GONE = "died or was stopped"
SAID = "raised ValueError: the fault that was asked for"

FAULTS = [
    # kind, rank, what it does then, what the report says
    ("kill", ENCODER, "step 3 (train), microbatch 1", GONE),
    ("kill", LANGUAGE, "step 3 (train), microbatch 1", GONE),
    ("kill", LANGUAGE, "step 3 (train), optimizer", GONE),
    ("kill", ENCODER, "saving step 4, writing", GONE),
    ("kill", LANGUAGE, "saving step 4, writing", GONE),
    ("stop", ENCODER, "step 3 (train), microbatch 1", GONE),
    ("stop", LANGUAGE, "step 3 (train), microbatch 1", GONE),
    ("stop", LANGUAGE, "step 3 (train), optimizer", GONE),
    ("stop", LANGUAGE, "saving step 4, writing", GONE),
    ("raise", ENCODER, "step 3 (train), optimizer", SAID),
    ("raise", LANGUAGE, "step 3 (train), microbatch 1", SAID),
    ("raise", LANGUAGE, "step 3 (train), reading samples", SAID),
    ("hang", ENCODER, "step 3 (train), microbatch 1", "hangs: no progress"),
    ("hang", LANGUAGE, "step 3 (train), microbatch 1", "hangs: no progress"),
    ("hang", LANGUAGE, "saving step 4, publishing", "hangs: no progress"),
    ("disk", LANGUAGE, "saving step 4, writing", "could not be written"),
]


def fault(kind: str, rank: int, at: str, **more) -> tuple[str, str]:
    """The program with this fault."""
    return FAULTY, json.dumps({"kind": kind, "rank": rank, "at": at, **more})


def assert_whole(checkpoint: Path) -> None:
    """Every file has the hash that was written down when it was saved."""
    manifest = json.loads((checkpoint / "integrity.json").read_text())
    assert len(manifest["files"]) >= 4
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == digest


def saved_steps(directory: Path) -> list[str]:
    return sorted(path.parent.name for path in directory.glob("step_????????/run.json"))


def losses(path: Path) -> dict[int, float]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


class Struck(NamedTuple):
    """What became of a run with a fault.

    codes: of the processes. errors: all that they wrote. seconds: from the first save to the end.
    """

    codes: list[int]
    errors: str
    seconds: float


def strike(kind: str, rank: int, at: str, saved: Path) -> Struck:
    """Train until the fault has ended the run, which saves before it; stopped ranks are killed."""
    processes = start(2, *ARGUMENTS, "--save", saved, program=fault(kind, rank, at))
    try:
        wait_for(saved / "step_00000002" / "run.json")
        started = time.monotonic()
        for number, process in enumerate(processes):
            if (kind, number) != ("stop", rank):
                process.wait(LIMIT_S + UNTIL_FAULT_S)
        seconds = time.monotonic() - started
    finally:
        for process in processes:
            kill(process)
    errors = "".join(process.stderr.read() for process in processes)
    return Struck([process.returncode for process in processes], errors, seconds)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, "the run did not get to its first save"
        time.sleep(0.1)


class TestOneReport:
    @pytest.fixture(scope="class")
    def runs(self, request, tmp_path_factory):
        """Runs by fault, under way: some at a time, because they mostly wait."""
        asked = [
            tuple(item.callspec.params[name] for name in ("kind", "rank", "at"))
            for item in request.session.items
            if item.cls is type(self)
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            directories = {key: tmp_path_factory.mktemp("faults") / "saved" for key in asked}
            yield {
                key: (directory, pool.submit(strike, *key, directory))
                for key, directory in directories.items()
            }

    @pytest.mark.parametrize(("kind", "rank", "at", "text"), FAULTS)
    def test_ends_the_run(self, runs, kind, rank, at, text):
        saved, future = runs[kind, rank, at]
        run = future.result()
        assert run.seconds < LIMIT_S + UNTIL_FAULT_S
        lines = [line for line in run.errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, run.errors
        assert f"rank {rank}" in lines[0] and text in lines[0]
        assert 0 not in run.codes
        assert saved_steps(saved)[0] == "step_00000002"
        for step in saved_steps(saved):
            assert_whole(saved / step)


class TestBadGradients:
    @pytest.mark.parametrize(("module", "rank"), [("images", ENCODER), ("language", LANGUAGE)])
    def test_are_skipped_and_counted(self, module, rank, tmp_path):
        metrics = tmp_path / "metrics.jsonl"
        program = fault("nan", rank, "step 3 (train), optimizer", module=module)
        ends = run(2, *ARGUMENTS[:4], "--metrics-out", metrics, program=program)
        assert [end.code for end in ends] == [0, 0], [end.errors for end in ends]
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [record["skipped"] for record in records] == [False, False, True] + [False] * 3
        assert [record["skipped_steps"] for record in records] == [0, 0, 1, 1, 1, 1]

    def test_too_many_in_a_row_end_the_run(self, tmp_path):
        """What is being saved then is finished."""
        program = fault("nan", LANGUAGE, "(train), optimizer", module="language", times=9)
        saving = ("--save", tmp_path / "saved", "--save-interval", "1", "--async-save")
        ends = run(2, *ARGUMENTS[:4], *saving, "--max-skipped-steps", "2", program=program)
        assert [end.code for end in ends] == [1, 1]
        (line,) = [line for end in ends for line in end.error_lines]
        assert "3 steps in a row up to step 3" in line and "--max-skipped-steps 2" in line
        assert saved_steps(tmp_path / "saved") == ["step_00000001", "step_00000002"]
        assert_whole(tmp_path / "saved" / "step_00000002")


class TestRestart:
    def test_goes_on_from_the_newest_checkpoint(self, tmp_path):
        """Under torchrun a killed rank costs the steps since the last save, and nothing else."""
        whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
        ends = run(2, *ARGUMENTS, "--metrics-out", whole, "--save", tmp_path / "whole")
        assert [end.code for end in ends] == [0, 0], [end.errors for end in ends]
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        ended = subprocess.run(
            [
                *(sys.executable, *torchrun, "--max-restarts", "1"),
                *fault("kill", LANGUAGE, "step 4 (train), microbatch 0"),
                *map(str, ARGUMENTS),
                *("--metrics-out", cut, "--save", tmp_path / "cut", "--restart-from-latest"),
            ],
            cwd=CHECKOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        assert losses(cut) == losses(whole)
        assert sorted(losses(cut)) == [1, 2, 3, 4, 5, 6]
