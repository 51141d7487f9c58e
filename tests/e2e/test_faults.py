# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How runs end: bad input is one line with the fact and the fix, exit code 2 on every rank, nothing
written; a rank that dies or hangs ends the run, by torchrun's agent and the limits on collectives,
and nothing saved is lost; after a signal the last line says what is saved."""

import functools
import hashlib
import json
import os
import re
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.training import training
from tests.e2e.launch import (
    CHECKOUT,
    LIMIT_S,
    REPOSITORY,
    end_of,
    forked,
    kill,
    run,
    wait_until,
)
from tests.ranks import run_ranks
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import is_of_this_process

FILE = Path(__file__)


def assert_ended(code: int, arguments: list[str | Path], *texts: str) -> str:
    """Assert that both ranks end with this code, and one line with the texts; return all lines."""
    codes, said = run(2, *arguments)
    assert codes == [code, code], said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    for text in texts:
        assert text in line
    return said


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--save", FILE / "saved"], ["--save", "cannot write there (Not a directory)"]),
        (["--load", FILE.parent], [f"--load {FILE.parent}: no checkpoint there"]),
    ],
)
def test_an_option_that_cannot_work_is_refused(arguments, texts, tmp_path):
    said = assert_ended(2, ["--save", tmp_path / "saved", *arguments], *texts)
    assert "end of arguments" not in said, "the dump hides the line"
    assert not list(tmp_path.glob("saved/*"))


def test_a_loss_that_is_not_finite_is_one_line_with_the_cure():
    words = ["--train-iters", "4", "--lr", "1e30"]
    assert_ended(16, words, "the loss of a step is not finite", "lower --lr")


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """The run before has counted samples, and written its report and its options."""
    page, metrics = tmp_path / "report.html", tmp_path / "metrics.jsonl"
    report = ("--eval-iters", "1", "--report", page, "--metrics-out", metrics)
    samples = "--train-samples", "64", "--global-batch-size", "32"
    codes, said = run(1, *report, *samples, "--save-interval", "1", "--save", tmp_path)
    assert codes == [0], said
    assert "\nstep 2 of 2: loss" in said and "a larger --train-samples goes on" in said
    assert page.read_text().count("<svg") == 4 and f"page: {page.as_uri()}\n" in said
    before = (tmp_path / "config.yaml").read_text()
    assert f"\nsave: {tmp_path}\n" in before
    files = tmp_path.glob("iter_0000002/*.distcp")
    damaged = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    again = ["--load", tmp_path, "--save", tmp_path, "--log-file", tmp_path / "log.txt"]
    assert_ended(2, again, "is damaged", damaged.name, "--ckpt-step 1")
    assert (tmp_path / "config.yaml").read_text() == before


def test_commands_are_named_where_tools_can_take_the_checkpoint(tmp_path):
    """Tools need the base of adapters, and initial weights are not saved."""
    words = "--train-iters", "1", "--eval-iters", "0", "--save"
    for options in ((), ("--lora-dim", "4")):
        codes, said = run(1, *words, tmp_path / str(len(options)), *options)
        assert codes == [0] and ("\nexport it: " in said) == (not options), said


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


def _faulty_ranks(fault: str, arguments: list[str]) -> int:
    return run_ranks(2, _faulty_rank, fault, arguments, restarts=1)


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


def test_a_run_that_a_fault_ends_in_a_save_goes_on_from_the_checkpoint_before(tmp_path):
    """The losses agree to the last bit: only the steps since that checkpoint are lost. A limit on
    collectives ends the peer of a rank that hangs, and the agent ends that rank."""
    whole = tmp_path / "whole/metrics.jsonl"
    codes, said = run(2, *ARGUMENTS, "--metrics-out", whole, "--save", whole.parent)
    assert codes == [0, 0], said
    for fault in FAULTS:
        folder = tmp_path / fault
        folder.mkdir()
        cut, saved, errors = (folder / name for name in ("cut.jsonl", "saved", "errors"))
        places = map(str, ("--metrics-out", cut, "--save", saved, "--load", saved))
        started = forked(_faulty_ranks, fault, [*ARGUMENTS, *places], said=errors)
        assert end_of(started) == 0, errors.read_text()
        # A log for each start, or one for both if they fall into one second.
        said = "".join(log.read_text() for log in sorted(folder.glob("log-*.txt")))
        before, on, after = said.partition("going on after step 2 of 6")
        loaded = r"loaded checkpoint .* at iteration (\d+)"
        assert on and "a new run" in before and not re.search(loaded, before)
        assert set(re.findall(loaded, after)) == {"2"} and "step 6 of 6: loss" in after
        assert losses(cut) == losses(whole)
        assert [record["step"] for record in read_metrics(cut)] == [1, 2, 3, 4, 5, 6]


PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
LAUNCHER = ("--standalone", "--nproc-per-node", "2", PROGRAM)
ALONE = ()
SMALL = ("--train-iters", "100000", "--global-batch-size", "2", "--micro-batch-size", "1")
SMALL += ("--eval-iters", "0", "--seq-length", "32")
SAVED = "--save-interval 2 --exit-interval 100000 --save {save}"
HANDLED = SAVED + " --load {save} --exit-signal-handler"
STANDS = "step {step} is saved in {save}; the same command"
ANEW = "with --load {save}, without --finetune and --ckpt-step, goes on from there"


@pytest.mark.parametrize(
    ("start", "sent", "options", "code", "line"),
    [
        (LAUNCHER, signal.SIGINT, "", 130, "nothing is saved: there is no --save"),
        (ALONE, signal.SIGTERM, SAVED, -signal.SIGTERM, f"{STANDS} {ANEW}"),
        (LAUNCHER, signal.SIGTERM, HANDLED, 0, f"left as asked: {STANDS} goes on from there"),
    ],
    ids=["Ctrl-C", "SIGTERM of one process", "SIGTERM that the launcher hands on"],
)
def test_the_last_line_says_what_is_saved_and_how_to_go_on(
    start, sent, options, code, line, tmp_path
):
    save, said, metrics = tmp_path / "saved", tmp_path / "said", tmp_path / "metrics.jsonl"
    words = [*start, *SMALL, "--metrics-out", str(metrics), *options.format(save=save).split()]
    started = forked(_start, words, said=said)
    tracker = save / "latest_checkpointed_iteration.txt"
    begun = tracker if options else metrics
    try:
        wait_until(lambda: (begun.exists() and begun.read_text()) or _ended(started), LIMIT_S)
        (os.kill if options == HANDLED else os.killpg)(started.pid, sent)
        ended, text = end_of(started), said.read_text()
    finally:
        kill(started)
    assert ended == code, text
    line = line.format(step=tracker.read_text() if options else "", save=save)
    reason = f"error: ended by {sent.name}: " if code else ""
    assert text.splitlines()[-1] == reason + line
    assert "Traceback" not in text and len(text.splitlines()) < 20, text


def _start(words: list[str]) -> int:
    """Be the launcher, or the program alone, with a process group of its own."""
    from examples.mimo.common.launch import launch
    from examples.mimo.pretrain_nemotron_vlm import main

    os.setsid()
    for name in filter(is_of_this_process, list(os.environ)):  # a test before may have set it
        del os.environ[name]
    os.environ["PYTHONPATH"] = f"{CHECKOUT}{os.pathsep}{REPOSITORY}"
    return launch(words) if words[0] == LAUNCHER[0] else main(words)


def _ended(process: BaseProcess) -> bool:
    assert process.is_alive(), "it ended before the signal"
    return False
