# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, stops, hangs or raises: torchrun's agent and the limits on collectives end the
run, and nothing saved is lost."""

import hashlib
import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
from tests.e2e.launch import faulty_ranks, forked, kill, run, wait_until

ENCODER, LANGUAGE = 0, 1

WAITING_S = 20
"""Limit on a collective after the first step. A transfer between stages has a minute, because gloo
keeps its first limit for those."""

LIMIT_S = 120
"""Limit on the time from the first save, which can be seen from outside, to the end of every rank.
The agent gives a stopped rank 30 s before it kills it."""

AT_ONCE = 4
"""Number of runs at a time."""

ARGUMENTS = (
    *("--placement", "non-colocated", "--train-iters", "6", "--save-interval", "2"),
    *("--global-batch-size", "8", "--micro-batch-size", "4", "--seed", "1"),
    *("--distributed-timeout-minutes", "1"),
    *("--distributed-timeout-seconds-after-init", str(WAITING_S)),
)

FAULTS = [
    # kind, rank, iteration, and what the rank does when the fault strikes
    ("kill", ENCODER, 3, "microbatch"),
    ("kill", LANGUAGE, 3, "optimizer"),
    ("kill", ENCODER, 4, "writing"),
    ("stop", LANGUAGE, 3, "microbatch"),
    ("stop", ENCODER, 3, "optimizer"),
    ("stop", LANGUAGE, 4, "writing"),
    ("raise", ENCODER, 3, "optimizer"),
    ("raise", LANGUAGE, 3, "reading samples"),
    ("hang", ENCODER, 3, "microbatch"),
    ("hang", LANGUAGE, 4, "publishing"),
    ("disk", LANGUAGE, 4, "writing"),
]
"""Every kind on either module; in every place, a rank that ends and one that goes silent."""


def start_faulty(
    errors: Path, kind: str, rank: int, iteration: int, at: str, *more: object, restarts: int = 0
) -> BaseProcess:
    """Start the program with this fault and return at once; the file gets its error output."""
    fault = {"kind": kind, "rank": rank, "iteration": iteration, "at": at}
    return forked(faulty_ranks, errors, fault, list(map(str, (*ARGUMENTS, *more))), restarts)


def newest(directory: Path) -> int:
    """Iteration of the newest whole checkpoint; 0 without one."""
    tracker = directory / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def assert_whole(checkpoint: Path, ranks: int = 2) -> None:
    """Assert that every file has the hash that was written down when it was saved."""
    manifest = json.loads((checkpoint / "integrity.json").read_text())
    assert len(manifest["files"]) >= ranks + 2  # two describe the others
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == digest


def losses(metrics: Path) -> dict[int, float]:
    """The loss of each step that a run has recorded."""
    return {record["step"]: record["loss"] for record in read_metrics(metrics)}


def saves_that_failed(errors: str) -> list[tuple[str, str]]:
    """Whether a run went on or ended with each of them, and its step."""
    return re.findall(r"(?m)^(warning|error): --save .*: step (\d+) was not saved: ", errors)


class Struck(NamedTuple):
    """Outcome of a run with a fault.

    code: the agent's. errors: output of agent and ranks. seconds: from the first save to the end.
    """

    code: int
    errors: str
    seconds: float


def strike(kind: str, rank: int, iteration: int, at: str, saved: Path, *more: str | Path) -> Struck:
    """Train until the fault ends the run, which has saved before."""
    errors = saved.with_name("errors.txt")
    process = start_faulty(errors, kind, rank, iteration, at, "--save", saved, *more)
    try:
        wait_until(lambda: newest(saved) or not process.is_alive(), 300)
        assert newest(saved)
        started = time.monotonic()
        process.join(LIMIT_S + 30)
        return Struck(process.exitcode, errors.read_text(), time.monotonic() - started)
    finally:
        kill(process)


class TestEnds:
    @pytest.fixture(scope="class")
    def runs(self, request, tmp_path_factory):
        """Start a run for each fault, several at a time because they mostly wait."""
        asked = [
            tuple(item.callspec.params[name] for name in ("kind", "rank", "iteration", "at"))
            for item in request.session.items
            if item.cls is type(self)
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            directories = {key: tmp_path_factory.mktemp("faults") / "saved" for key in asked}
            yield {
                key: (directory, pool.submit(strike, *key, directory))
                for key, directory in directories.items()
            }

    @pytest.mark.parametrize(("kind", "rank", "iteration", "at"), FAULTS)
    def test_ends_the_run(self, runs, kind, rank, iteration, at):
        saved, future = runs[kind, rank, iteration, at]
        ended = future.result()
        assert ended.code != 0
        assert ended.seconds < LIMIT_S
        if kind in ("kill", "raise"):
            assert f"rank {rank} failed first" in ended.errors
        if kind == "raise":
            assert f"error: rank {rank}: ValueError: the fault that was asked for" in ended.errors
        if kind == "kill":  # its peer has one line, or was ended before it noticed
            assert ended.errors.count("\n  File ") == 0
            peers = re.findall("^error: (.*)", ended.errors, re.MULTILINE)
            lost = f"rank {1 - rank} has lost another rank, which "
            assert len(peers) <= 1 and all(line.startswith(lost) for line in peers)
        if kind == "disk":  # the run goes on, and its last save fails, too
            assert saves_that_failed(ended.errors) == [("warning", "4"), ("error", "6")]
            assert newest(saved) == 2
        assert newest(saved) >= 2
        assert_whole(saved / f"iter_{newest(saved):07d}")


class TestRestart:
    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory) -> dict[int, float]:
        """The losses of a run without fault."""
        path = tmp_path_factory.mktemp("whole")
        ends = run(2, *ARGUMENTS, "--metrics-out", path / "metrics.jsonl", "--save", path)
        assert [end.code for end in ends] == [0, 0], [end.errors for end in ends]
        return losses(path / "metrics.jsonl")

    def test_from_the_file_that_it_has_written_has_the_same_losses(self, tmp_path):
        first, again = tmp_path / "first/metrics.jsonl", tmp_path / "again/metrics.jsonl"
        given = (*ARGUMENTS, "--lr", "3e-3", "--encoder-lr", "1e-3", "--data", "digits:2")
        file = ("--config", first.with_name("config.yaml"), "--metrics-out", again)
        for options in ((*given, "--metrics-out", first), file):
            ends = run(2, *options)
            assert [end.code for end in ends] == [0, 0], [end.errors for end in ends]
        assert losses(again) == losses(first) and len(losses(first)) == 6

    def test_after_a_loading_process_has_died_is_left_to_the_user(self, tmp_path):
        errors = tmp_path / "errors.txt"
        process = start_faulty(errors, "loader", LANGUAGE, 3, "optimizer", "--num-workers", "1")
        process.join(300)
        assert process.exitcode != 0
        dead = rf"(?m)^error: rank {LANGUAGE}: --data: DataLoader worker \(pid.*; it was reading "
        assert len(re.findall(dead, errors.read_text())) == 1, errors.read_text()

    def test_after_a_kill_during_a_save_goes_on_from_the_checkpoint_before(self, whole, tmp_path):
        """The losses agree to the last bit: only the steps since that checkpoint are lost."""
        cut, saved = tmp_path / "cut.jsonl", tmp_path / "cut"
        places = ("--metrics-out", cut, "--save", saved, "--load", saved)
        errors = tmp_path / "errors.txt"
        process = start_faulty(errors, "kill", LANGUAGE, 4, "writing", *places, restarts=1)
        process.join(300)
        assert process.exitcode == 0, errors.read_text()
        # A log for each start, or one for both if they fall into one second.
        said = "".join(log.read_text() for log in sorted(tmp_path.glob("log-*.txt")))
        before, on, after = said.partition("going on after step 2 of 6")
        loaded = r"loaded checkpoint .* at iteration (\d+)"
        assert on and "a new run" in before and not re.search(loaded, before)
        assert set(re.findall(loaded, after)) == {"2"} and "step 6 of 6: loss" in after
        assert losses(cut) == whole
        assert [record["step"] for record in read_metrics(cut)] == [1, 2, 3, 4, 5, 6]


class TestFileSystem:
    @pytest.fixture
    def disk(self, tmp_path):
        """A file system of its own, which needs root."""
        path = tmp_path / "disk"
        path.mkdir()
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "disk", path], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        yield path
        subprocess.run(["umount", "-l", path], check=True)

    def test_that_is_full_until_the_last_save_ends_the_run_with_the_reason(self, disk):
        """The checkpoint before it is as it was. Metrics and log, on the full disk, too, do not end
        it."""
        more = ("--metrics-out", disk / "metrics.jsonl")
        ended = strike("full", ENCODER, 4, "optimizer", disk, *more)
        assert ended.code != 0
        assert saves_that_failed(ended.errors) == [("warning", "4"), ("error", "6")]
        assert "; 0.00 GB are free there" in ended.errors
        assert newest(disk) == 2
        assert_whole(disk / "iter_0000002")
