# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run goes on where a save fails, on any rank and in any file. Three checkpoints stay: the
newest, the best, and the run's first."""

import functools
import json
import re
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.loop import best
from examples.mimo.nemotron_vlm.loop.best import best_of
from examples.mimo.nemotron_vlm.loop.forward_step import SCORES
from examples.mimo.nemotron_vlm.options import run
from megatron.core.dist_checkpointing import parallel_manifest, serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import checkpointing, training
from megatron.training.checkpointing import get_checkpoint_tracker_filename as tracker_of
from megatron.training.global_vars import get_args
from tests.e2e.test_faults import assert_whole, newest
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import trajectory
from tests.unit_tests.test_utilities import Utils, requires_world_size

FULL = "No space left on device"

SAVES = ("--micro-batch-size", "16", "--save-interval", "1", "--save")


class Place(NamedTuple):
    """A function that a save calls on one rank, and that rank."""

    owner: ModuleType | type
    name: str
    rank: int


PLACES = {
    "a rank's probe": Place(tempfile, "TemporaryFile", 1),
    "a rank's tensors": Place(filesystem_async, "_write_item", 1),
    "the description of all tensors": Place(filesystem_async.FileSystemWriterAsync, "finish", 0),
    "the description of the format": Place(serialization, "save_config", 0),
    "the hashes": Place(parallel_manifest, "_write_manifest", 0),
    "the tracker": Place(checkpointing, "whole_file", 0),
}


def let_fail(monkeypatch, place: Place, step: int, error: BaseException | None = None) -> None:
    """Let the function raise an error in the save of a step; by default, the disk is full."""
    original = getattr(place.owner, place.name)

    @functools.wraps(original)
    def called(*arguments, **named):
        if Utils.rank == place.rank and get_args().curr_iteration + 1 == step:
            raise error or OSError(28, FULL)
        return original(*arguments, **named)

    monkeypatch.setattr(place.owner, place.name, called)


def wait_for_deletions() -> None:
    """Wait until Megatron has deleted what it does not keep; collective."""
    for thread in threading.enumerate():
        if "_async_delete_checkpoint_impl" in thread.name:
            thread.join()
    dist.barrier()


@requires_world_size(1)
def test_a_step_is_saved_once(tmp_path):
    """Megatron saves where the batch grows, too."""
    growing = "--step-batch-size-schedule", "0:16 1K:32"
    with mock.patch.object(checkpointing, "whole_file", wraps=checkpointing.whole_file) as written:
        trajectory(*SAVES, str(tmp_path), *growing, steps=3)
    assert newest(tmp_path) == 3 and written.call_count == 3


@requires_world_size(1)
def test_after_the_writers_death_a_save_fails_and_later_ones_are_synchronous(
    tmp_path, monkeypatch, capfd
):
    """The program refuses asynchronous saves on a CPU: training would change the tensors while they
    are written. Here a pause before each step leaves the processor to the process that writes."""
    monkeypatch.setattr(run, "RULES", [r for r in run.RULES if r.title != "--async-save"])
    take, killed = training.train_step, []

    @functools.wraps(take)
    def paused(*arguments, **named):
        started = psutil.Process().children(recursive=True)
        if writers := [each for each in started if each.nice() == 10 and not killed]:
            killed.append(min(writers, key=psutil.Process.create_time))  # it may have started one
            killed[0].kill()
        time.sleep(0.2)
        return take(*arguments, **named)

    monkeypatch.setattr(training, "train_step", paused)
    writer = "--async-save", "--async-ckpt-io-priority", "2"  # a niceness of 10
    saves = "--micro-batch-size", "16", "--save-interval", "3", "--save", str(tmp_path)
    trajectory("--global-batch-size", "16", *saves, *writer, "--train-iters", "12")
    out, said = capfd.readouterr()
    failed = re.findall(r"step (\d+) was not saved: rank 0: its writing process has ended; ", said)
    later = re.findall(r"step (\d+) was not saved: the save before it failed; ", said)
    assert failed == ["3"] and later in ([], ["6"])  # the one after it may have been under way
    assert out.count("scheduled an async checkpoint save") == 1 + len(later)
    made = {int(path.name[5:]) for path in tmp_path.glob("iter_*")}
    assert made == {3, 6, 9, 12} - {int(step) for step in failed + later}
    for step in made:
        assert_whole(tmp_path / f"iter_{step:07d}", ranks=1)


@requires_world_size(2)
class TestFails:
    @pytest.mark.parametrize(
        ("place", "raised"),
        [
            *((place, None) for place in PLACES),
            ("the hashes", CheckpointException("w", {})),
            ("the hashes", SystemExit(3)),
        ],
        ids=repr,
    )
    def test_at_a_step_and_the_next_saves_again(
        self, place, raised, monkeypatch, shared_path, capfd
    ):
        """By any class of error: PyTorch's own is no `Exception`, and Megatron exits in places."""
        let_fail(monkeypatch, PLACES[place], 2, raised)
        steps = trajectory(*SAVES, str(shared_path), steps=3)
        assert [record["step"] for record in steps] == [1, 2, 3]
        dist.barrier()
        assert newest(shared_path) == 3
        left = sorted(shared_path.glob("iter_*"))
        assert [path.name for path in left] == ["iter_0000001", "iter_0000003"]
        for path in left:
            assert_whole(path)
        said = [line for line in capfd.readouterr().err.splitlines() if "was not saved" in line]
        assert len(said) == (Utils.rank == 0)
        if said:
            assert said[0].startswith(f"warning: --save {shared_path}: step 2 was not saved: ")
            assert said[0].endswith("GB are free there; the next save tries again")
            # Megatron's writer names the error's class only.
            why = (FULL, "<class 'OSError'>")[place == "a rank's tensors"]
            assert raised or why in said[0]
        dist.barrier()  # the first rank deletes the directory

    @pytest.mark.parametrize(
        ("place", "ends"),
        [
            ("a rank's probe", ("--train-iters", "3")),
            ("the tracker", ("--exit-interval", "3")),
        ],
    )
    def test_at_the_last_step_and_the_run_ends_with_the_line(
        self, place, ends, monkeypatch, shared_path
    ):
        """The checkpoint before it is kept, though only the newest is to be, and so is what an
        earlier run had saved, where the save did not begin."""
        later = shared_path / "iter_0000003/__0_0.distcp"
        later.parent.mkdir(exist_ok=True)
        later.touch()
        has_begun, place = place == "the tracker", PLACES[place]
        let_fail(monkeypatch, place, 3)
        kept = ("--save-retain-interval", "100", *ends)
        with pytest.raises(UserError, match="step 3 was not saved: .*before it is as it was$"):
            trajectory(*SAVES, str(shared_path), *kept)
        wait_for_deletions()  # of the first step's
        assert newest(shared_path) == 2
        names = ["iter_0000002", *[later.parent.name] * (not has_begun)]
        assert sorted(path.name for path in shared_path.glob("iter_*")) == names
        assert_whole(shared_path / "iter_0000002")
        if not has_begun:  # a folder with files of a save that came to no end
            with pytest.raises(UserError, match=r"has no iter_0000003; steps there: 2$"):
                trajectory("--load", str(shared_path), "--ckpt-step", "3", steps=9)
        dist.barrier()


def of_files(directory: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in directory.iterdir()}


def saved(folder: Path, *options: str, steps: int) -> tuple[list[int], list[int]]:
    """Save each step of a run; return the steps that it took, and those whose checkpoints it left,
    the newest alone unless others are to stay."""
    keeps = ("--save-retain-interval", "100", *options)
    records = trajectory(*SAVES, str(folder), *keeps, steps=steps)
    wait_for_deletions()
    assert newest(folder) == steps
    left = sorted(int(path.name[5:]) for path in folder.glob("iter_*"))
    dist.barrier()  # a rank may change the folder next
    return [record["step"] for record in records], left


@requires_world_size(2)
@pytest.mark.parametrize(
    ("before", "tracker", "begins", "taken", "stays", "said"),
    [
        (1, "release", ("--load",), [1, 2], True, 0),
        (1, "x\n", (), [1, 2], True, 0),
        (3, "", ("--load", "--finetune"), [1, 2, 3, 4], True, 1),
        (3, "", ("--pretrained-checkpoint",), [1, 2], True, 0),
        (1, "", ("--load",), [2], False, 0),
    ],
)
def test_the_checkpoint_before_is_deleted_and_written_over_only_where_the_run_goes_on_from_it(
    before, tracker, begins, taken, stays, said, shared_path, capfd
):
    """Trackers that name no step: a converted checkpoint has such a one; the run saves as if it
    were of step 0, and deletes its own."""
    saved(shared_path, steps=before)
    source = shared_path / f"iter_{before:07d}"
    if tracker:
        if Utils.rank == 0:
            source.rename(shared_path / "release")
            Path(tracker_of(str(shared_path))).write_text(tracker)
        source = shared_path / "release"
    dist.barrier()
    files, words = of_files(source), list(begins)
    words[1:1] = [str(shared_path)] * bool(begins)
    left = {taken[-1], *[before] * (stays and not tracker)}
    assert saved(shared_path, *words, steps=taken[-1]) == (taken, sorted(left))
    assert not stays or of_files(source) == files
    text = capfd.readouterr().err
    assert text.count("has the weights that this run began with") == said * (Utils.rank == 0)
    dist.barrier()


@requires_world_size(2)
class TestTheBest:
    """Losses of evaluations are made up: 3, 1, 2, 1.5 and, where the run goes on, 0.5."""

    LOSSES = 3.0, 1.0, 2.0, 1.5, 0.5

    def left(self, folder: Path, monkeypatch, steps: int, *options: str) -> list[int]:
        def evaluated(*arguments, **named):
            loss = torch.tensor(self.LOSSES[get_args().curr_iteration])
            scores = dict.fromkeys(SCORES.values(), loss)
            return (scores if Utils.rank == Utils.world_size - 1 else {}), None, False

        monkeypatch.setattr(training, "evaluate", evaluated)
        keeps = ("--keep-best", "eval_loss", "--eval-interval", "1", "--eval-iters", "1")
        return saved(folder, *keeps, *options, steps=steps)[1]

    def test_is_kept_beside_the_newest_until_a_better_one(self, shared_path, monkeypatch):
        assert self.left(shared_path, monkeypatch, 4) == [2, 4]
        assert best_of(shared_path).name == "iter_0000002"
        assert_whole(best_of(shared_path))
        dist.barrier()
        assert self.left(shared_path, monkeypatch, 5, "--load", str(shared_path)) == [2, 5]
        assert json.loads((shared_path / "best.json").read_text()) == {"step": 5, "eval_loss": 0.5}
        dist.barrier()

    def test_stays_where_a_run_goes_on_without_it_or_by_another_score(
        self, shared_path, monkeypatch
    ):
        assert self.left(shared_path, monkeypatch, 2) == [2]
        goes_on = "--load", str(shared_path)
        assert saved(shared_path, *goes_on, steps=3) == ([3], [2, 3])
        assert best_of(shared_path).name == "iter_0000002"
        other = "--keep-best", "eval_accuracy"
        assert self.left(shared_path, monkeypatch, 4, *goes_on, *other) == [2, 4]
        assert best_of(shared_path).name == "iter_0000004"
        dist.barrier()

    def test_stays_where_the_file_that_would_name_another_cannot_be_written(
        self, shared_path, monkeypatch
    ):
        let_fail(monkeypatch, Place(best, "whole_file", 0), 2)
        assert self.left(shared_path, monkeypatch, 2) == [1, 2]
        assert best_of(shared_path).name == "iter_0000001"
        dist.barrier()

    def test_is_none_where_its_save_failed(self, shared_path, monkeypatch):
        let_fail(monkeypatch, PLACES["a rank's tensors"], 2)
        assert self.left(shared_path, monkeypatch, 3) == [3]
        assert best_of(shared_path).name == "iter_0000003"
        dist.barrier()
