# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves, ended by the signal that ends a run, and by the death of a rank.

Each run is the program under torchrun, as a job starts it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
from tests.e2e.launch import kill, wait_until
from tests.e2e.test_faults import assert_whole, newest
from tests.unit_tests.examples.nemotron_vlm.loop.models import ENGINE, TOLERANCE
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import apart

RANKS = int(os.environ.get("RANKS", "2"))
LAYOUT = ("--encoder", "dp=2", "--language", "tp=2,ep=2,etp=1") if RANKS == 2 else ()

STEPS = 40
OPTIONS = (
    *("--device", "cuda", *ENGINE, *LAYOUT, "--train-iters", str(STEPS), "--seed", "1"),
    *("--global-batch-size", "16", "--micro-batch-size", "8", "--lr", "1e-4", "--adam-eps", "1e-3"),
    *("--save-interval", "4", "--exit-signal-handler", "--exit-signal", "SIGUSR1"),
)
"""Saves are asynchronous by default."""

LIMIT_S = 400
"""Time limit of a run, on GPUs that others use as well."""


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Run:
    """The program on this host's GPUs, which goes on from its saves; it ends with the block.

    Args:
        folder: holds its checkpoints, its metrics and its log.
        restarts: how often torchrun starts its ranks again.
    """

    def __init__(self, folder: Path, restarts: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.saved = folder, folder / "checkpoints"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        launch += ["--max-restarts", str(restarts), "examples/mimo/pretrain_nemotron_vlm.py"]
        saved, metrics = str(self.saved), str(folder / "metrics.jsonl")
        given = [*OPTIONS, "--save", saved, "--load", saved, "--metrics-out", metrics]
        # torchrun ignores the signal, and so do ranks that are not set up yet.
        shell = ["bash", "-c", 'trap "" USR1; exec "$@"', "-", sys.executable]
        with (folder / "said.txt").open("a") as said:
            self.process = subprocess.Popen(
                [*shell, *launch, *given],
                cwd=os.environ["CHECKOUT"],
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def records(self) -> list[dict]:
        """Records of the steps so far."""
        return read_metrics(self.folder / "metrics.jsonl")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        kill(self.process)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait while the run is under way."""
        wait_until(lambda: is_so() or self.process.poll() is not None, LIMIT_S)
        assert is_so(), self.said()

    def ended(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(LIMIT_S)

    def said(self) -> str:
        """Return the end of its ranks' output."""
        logs = [self.folder / "said.txt", *sorted(self.folder.glob("log-*.txt"))]
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Iterator[Run]:
    """A run that nothing interrupts, at its end."""
    with Run(tmp_path_factory.mktemp("whole")) as run:
        assert run.ended() == 0, run.said()
        assert len(list(run.saved.glob("iter_*"))) == STEPS // 4
        yield run


def check(run: Run, whole: Run, record_property) -> None:
    """Assert that all steps have the losses of the whole run, and the last checkpoint is whole."""
    records = run.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    found = apart(records, whole.records())
    record_property("found", found)
    assert max(found.values()) <= TOLERANCE, found
    assert newest(run.saved) == STEPS
    assert_whole(run.saved / f"iter_{STEPS:07d}", RANKS)


def test_the_exit_signal_saves_and_the_run_goes_on(whole, tmp_path, record_property):
    """The signal reaches all processes, as Slurm sends it."""
    with Run(tmp_path) as run:
        run.wait_until(lambda: len(run.records()) >= 6)
        for process in psutil.Process(run.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        assert run.ended() == 0, run.said()
        assert "destroy_process_group() was not called" not in run.said()  # NCCL's warning
    stopped = newest(run.saved)
    assert 6 <= stopped == len(run.records()) < STEPS
    assert_whole(run.saved / f"iter_{stopped:07d}", RANKS)
    with Run(tmp_path) as again:
        assert again.ended() == 0, again.said()
    check(again, whole, record_property)


def test_a_killed_rank_takes_its_writer_along_and_the_run_goes_on(whole, tmp_path, record_property):
    with Run(tmp_path, restarts=1) as run:
        run.wait_until(lambda: newest(run.saved) >= 4)
        rank = psutil.Process(run.process.pid).children()[-1]  # as torchrun started them
        made = rank.children(recursive=True)
        rank.kill()
        psutil.wait_procs([rank, *made], timeout=60)
        assert not [process for process in made if lives(process)]
        assert run.ended() == 0, run.said()
    check(run, whole, record_property)
