# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Copies on each rank's own disk: runs go on from them to the last bit, or from a checkpoint."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.mimo.common import refusals
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options.arguments import parse
from megatron.training.checkpointing import get_checkpoint_tracker_filename as tracker_of
from tests.e2e.test_faults import newest
from tests.unit_tests.examples.nemotron_vlm.loop.models import FEW_EXPERTS
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import trajectory
from tests.unit_tests.models.mimo.whole_steps.test_mimo_checkpoint import Touch
from tests.unit_tests.test_utilities import Utils, requires_world_size

ON_TP = ("--encoder", "tp=1,dp=2", "--language", "tp=2")
ON_DP = ("--encoder", "tp=2", "--language", "dp=2")
APART = ("--placement", "non-colocated", "--encoder", "tp=1", "--language", "tp=1")

OPTIONS = (*FEW_EXPERTS, "--global-batch-size", "8", "--micro-batch-size", "2")
OPTIONS += ("--hidden-dropout", "0.2", "--save-interval", "2", "--save")
"""Every second step has a checkpoint. Dropout draws from the random states."""


def options_of_copies(directory: Path) -> tuple[str, ...]:
    kept = ("--non-persistent-local-ckpt-dir", str(directory / "own"))
    return ("--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "1", *kept)


@requires_world_size(1)
class TestOptions:
    def test_what_is_missing_is_named(self, monkeypatch, tmp_path):
        local = ["--non-persistent-ckpt-type", "local"]
        with pytest.raises(UserError, match="-save-interval needs --non-persistent-ckpt-type loc"):
            parse(["--non-persistent-save-interval", "2"], 1)
        monkeypatch.setattr(refusals, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="nvidia-resiliency-ext, which .* is not installed$"):
            parse(local, 1)
        monkeypatch.setattr(refusals, "find_spec", lambda name: name)
        with pytest.raises(UserError, match="needs --non-persistent-local-ckpt-dir DIR"):
            parse(local, 1)
        with pytest.raises(UserError, match="between checkpoints: add --save"):
            parse([*local, "--non-persistent-local-ckpt-dir", str(tmp_path)], 1)


@requires_world_size(2)
class TestTwoRanks:
    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("nvidia_resiliency_ext", minversion="0.6")

    @pytest.fixture
    def run(self, shared_path):
        """Train in a layout up to a step; return the records, from where the run goes on."""

        def trained(layout, steps, *more, copies=True):
            own = options_of_copies(shared_path) if copies else ()
            line = (*OPTIONS, str(shared_path), "--load", str(shared_path), *layout, *own, *more)
            records = trajectory(*line, steps=steps)
            dist.barrier()
            return records

        yield trained
        dist.barrier()  # the first rank deletes the directory

    def lose(self, directory: Path, after: int) -> None:
        """Delete the checkpoints after a step, as if the run had died before it saved them."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in directory.glob("iter_*"):
                if int(path.name[5:]) > after:
                    shutil.rmtree(path)
            tracker = Path(tracker_of(str(directory)))
            tracker.write_text(str(after)) if after else tracker.unlink()
        dist.barrier()

    def files(self, directory: Path) -> list[Path]:
        return sorted(directory.glob("own/*/*/*"))

    @pytest.mark.parametrize(
        ("layout", "options"),
        [(ON_TP, ()), (ON_DP, ("--bf16",)), (APART, ())],
        ids=["on tp", "on dp", "apart"],
    )
    @pytest.mark.parametrize("checkpoint", [2, 0])
    def test_goes_on_to_the_last_bit(self, layout, options, checkpoint, run, shared_path, capfd):
        uninterrupted = run(layout, 6, *options, copies=False)
        self.lose(shared_path, 0)
        run(layout, 3, *options)
        self.lose(shared_path, checkpoint)
        capfd.readouterr()
        assert same(run(layout, 6, *options)) == same(uninterrupted[3:])
        said = capfd.readouterr().err
        assert Utils.rank or f"going on after step 3 of 6, from {shared_path}/own/" in said
        assert [path.name for path in self.files(shared_path)] == [
            f"iter_0000005_{rank}_local.pt" for rank in range(2)
        ]

    def test_that_of_another_layout_is_left_alone(self, run, shared_path, capfd):
        """It is deleted when the run saves its own, of an earlier step."""
        run(ON_TP, 5)
        self.lose(shared_path, 2)
        assert [record["step"] for record in run(ON_DP, 4)] == [3, 4]
        assert [path.name[:12] for path in self.files(shared_path)] == ["iter_0000003"] * 2
        assert_said("is not loaded: of another layout: encoder tp=1,dp=2 → tp=2", capfd)

    def test_that_of_other_parts_is_left_alone(self, run, shared_path, capfd):
        """Frozen parts have no optimizer state, so that ranks have other shares of it."""
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        assert [record["step"] for record in run(ON_TP, 3, "--freeze", "projector")] == [3]
        assert_said("is not loaded: it lacks parts of this run on rank ", capfd)

    def test_that_of_a_way_not_taken_is_left_alone(self, run, shared_path, capfd):
        """The run went on from an older checkpoint, and has saved another one since."""
        run(ON_TP, 5)
        self.lose(shared_path, 2)
        run(ON_TP, 4, copies=False)
        assert [record["step"] for record in run(ON_TP, 6)] == [5, 6]
        assert_said("iter_0000004 since, without it", capfd)

    def test_that_of_a_run_whose_folder_was_emptied_is_left_alone(self, run, shared_path, capfd):
        run(ON_TP, 1)
        dist.barrier()
        if Utils.rank == 0:
            for path in shared_path.iterdir():
                if path.name != "own":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()
        assert [record["step"] for record in run(ON_TP, 1)] == [1]
        assert_said(f"is not loaded: {shared_path} has nothing of its run", capfd)

    def test_a_checkpoint_that_is_named_is_loaded(self, run, shared_path):
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        assert [record["step"] for record in run(ON_TP, 3, "--ckpt-step", "2")] == [3]

    @pytest.mark.parametrize("kind", ["cut short", "hostile"])
    def test_a_damaged_file_of_one_rank_is_not_loaded(self, kind, run, shared_path, capfd):
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        made, file = shared_path / "made", self.files(shared_path)[1]
        if Utils.rank == 1 and kind == "hostile":
            torch.save(Touch(made), file)
        elif Utils.rank == 1:
            os.truncate(file, 1000)
        assert [record["step"] for record in run(ON_TP, 3)] == [3]
        assert_said("is not loaded: its file is damaged on rank 1: ", capfd)
        assert not made.exists()

    def test_one_that_cannot_be_written_leaves_that_before(
        self, run, shared_path, monkeypatch, capfd
    ):
        def full(state, file):
            if Utils.rank == 1 and "0000003_1_local.dirty" in str(getattr(file, "name", "")):
                raise OSError(28, "No space left on device")
            return save(state, file)

        save = torch.save
        monkeypatch.setattr(torch, "save", full)
        run(ON_TP, 3, "--save-interval", "4")
        self.lose(shared_path, 0)
        assert_said("step 3 was not saved: rank 1: [Errno 28]", capfd)
        assert [path.name[:12] for path in self.files(shared_path)] == ["iter_0000002"] * 2
        assert [record["step"] for record in run(ON_TP, 3)] == [3]

    def test_a_run_that_ends_where_it_has_a_copy_saves_a_checkpoint(self, run, shared_path):
        with pytest.raises(SystemExit):
            run(ON_TP, 6, "--exit-interval", "3")
        dist.barrier()
        assert newest(shared_path) == 3


def same(records: list[dict]) -> list[tuple]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def assert_said(text: str, capfd) -> None:
    assert Utils.rank or text in capfd.readouterr().err
