# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or hangs: torchrun's agent and the limits on collectives end the run, and
nothing saved is lost."""

import functools
import hashlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.training import training
from tests.agent import run_ranks
from tests.e2e.launch import end_of, forked, run

ARGUMENTS = (
    *("--placement", "non-colocated", "--train-iters", "6", "--save-interval", "2"),
    *("--global-batch-size", "8", "--micro-batch-size", "4", "--seed", "1"),
    *("--distributed-timeout-minutes", "1", "--distributed-timeout-seconds-after-init", "20"),
)


FAULTS = {
    "killed while writing": (TorchDistSaveShardedStrategy, "save"),
    "hangs when all is written": (serialization, "save_manifest"),
}
"""Functions in which the fault strikes."""


def faulty(said: Path, fault: str, *more: object, restarts: int = 0) -> int | None:
    """Run the program with this fault to its end; return the launcher's exit code."""
    words = list(map(str, (*ARGUMENTS, *more)))
    return end_of(forked(_faulty_ranks, fault, words, restarts, said=said))


def _faulty_ranks(fault: str, arguments: list[str], restarts: int) -> int:
    return run_ranks(2, _faulty_rank, fault, arguments, restarts=restarts)


def _faulty_rank(fault: str, arguments: list[str]) -> None:
    """Train as one rank; the second is killed or hangs while it saves the fourth step."""
    from examples.mimo.pretrain_nemotron_vlm import main

    owner, name = FAULTS[fault]
    original = getattr(owner, name)

    @functools.wraps(original)
    def struck(*given, **named):
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        step = training.get_args().curr_iteration + 1
        if is_first and (os.environ["RANK"], step) == ("1", 4):
            os.kill(os.getpid(), signal.SIGKILL) if "killed" in fault else time.sleep(10**6)
        return original(*given, **named)

    setattr(owner, name, struck)
    if code := main(arguments):
        sys.exit(code)


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


def test_a_rank_that_hangs_ends_the_run(tmp_path):
    """A limit on collectives ends its peer, and the agent ends it."""
    saved, said = tmp_path / "saved", tmp_path / "said"
    assert faulty(said, "hangs when all is written", "--save", saved) == 1, said.read_text()
    assert newest(saved) >= 2
    assert_whole(saved / f"iter_{newest(saved):07d}")


def test_a_run_killed_during_a_save_goes_on_from_the_checkpoint_before(tmp_path):
    """The losses agree to the last bit: only the steps since that checkpoint are lost."""
    whole, cut, saved = (tmp_path / name for name in ("whole/metrics.jsonl", "cut.jsonl", "cut"))
    codes, said = run(2, *ARGUMENTS, "--metrics-out", whole, "--save", whole.parent)
    assert codes == [0, 0], said
    places = ("--metrics-out", cut, "--save", saved, "--load", saved)
    errors = tmp_path / "errors.txt"
    assert faulty(errors, "killed while writing", *places, restarts=1) == 0, errors.read_text()
    # A log for each start, or one for both if they fall into one second.
    said = "".join(log.read_text() for log in sorted(tmp_path.glob("log-*.txt")))
    before, on, after = said.partition("going on after step 2 of 6")
    loaded = r"loaded checkpoint .* at iteration (\d+)"
    assert on and "a new run" in before and not re.search(loaded, before)
    assert set(re.findall(loaded, after)) == {"2"} and "step 6 of 6: loss" in after
    assert losses(cut) == losses(whole)
    assert [record["step"] for record in read_metrics(cut)] == [1, 2, 3, 4, 5, 6]
