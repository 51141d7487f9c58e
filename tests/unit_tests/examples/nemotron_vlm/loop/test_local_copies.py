# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Copies on each rank's own disk: runs go on from them to the last bit, or from a checkpoint."""

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.mimo.common import refusals
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.loop.local_copies import LocalCopies
from examples.mimo.nemotron_vlm.options.arguments import parse
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
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
    ALL = (
        *("--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "1"),
        *("--non-persistent-local-ckpt-dir", "own", "--save", "saved", "--load", "saved"),
    )

    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(refusals, "find_spec", lambda name: name)

    @pytest.mark.parametrize("given", [{0}, {1}, {2}, {0, 1}, {0, 1, 2, 3}, {0, 2, 3, 4}])
    def test_all_are_given_or_none(self, given):
        """Without the others, each would do nothing, and say nothing."""
        line = [word for n in given for word in self.ALL[2 * n : 2 * n + 2]]
        with pytest.raises(UserError, match="copies between checkpoints need all of"):
            parse(line, 1)

    def test_all_together_are_taken(self):
        pytest.importorskip("nvidia_resiliency_ext", minversion="0.6")
        parse(self.ALL, 1)

    def test_an_interval_at_which_there_are_checkpoints_is_refused(self):
        with pytest.raises(UserError, match="-interval 1 makes no copy: those steps have a check"):
            parse([*self.ALL, "--save-interval", "1"], 1)

    def test_copies_of_another_folder_than_load_are_not_taken(self):
        with pytest.raises(UserError, match="--save S --load S with the same S"):
            parse([*self.ALL[:-1], "elsewhere"], 1)

    def test_the_library_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(refusals, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="nvidia-resiliency-ext, which .* is not installed$"):
            parse(self.ALL, 1)


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

    def once(self, change: Callable[[], object]) -> None:
        """Change files on one rank, while the others wait."""
        dist.barrier()
        if Utils.rank == 0:
            change()
        dist.barrier()

    def lose(self, directory: Path, after: int) -> None:
        """Delete the checkpoints after a step, as if the run had died before it saved them."""

        def delete() -> None:
            for path in directory.glob("iter_*"):
                if int(path.name[5:]) > after:
                    shutil.rmtree(path)
            tracker = Path(tracker_of(str(directory)))
            tracker.write_text(str(after)) if after else tracker.unlink(missing_ok=True)

        self.once(delete)

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
        partial = "iter_0000005_1_local.dirty.pt"  # its process was killed while it wrote
        self.once(self.files(shared_path)[1].with_name(partial).touch)
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
        assert_said("is not loaded: of other options: encoder tp=1,dp=2 → tp=2", capfd)

    def test_that_of_other_parts_is_left_alone(self, run, shared_path, capfd):
        """Frozen parts have no optimizer state, so that ranks have other shares of it. Nothing says
        that the run goes on from the copy."""
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        capfd.readouterr()
        assert [record["step"] for record in run(ON_TP, 3, "--freeze", "projector")] == [3]
        text = "is not loaded: of other options: freeze  → projector"
        assert_said(text, capfd, but_not="after step 3")

    def test_that_of_another_branch_is_left_alone(self, run, shared_path, capfd):
        """The run went on from an older checkpoint, and has saved another one since."""
        run(ON_TP, 5)
        self.lose(shared_path, 2)
        run(ON_TP, 4, copies=False)
        assert [record["step"] for record in run(ON_TP, 6)] == [5, 6]
        assert_said(f"is not loaded: it does not continue {shared_path}/iter_0000004", capfd)

    def test_that_of_a_run_whose_folder_was_emptied_is_left_alone(self, run, shared_path, capfd):
        run(ON_TP, 1)
        self.lose(shared_path, 0)
        self.once((shared_path / "attempt.txt").unlink)
        assert [record["step"] for record in run(ON_TP, 1)] == [1]
        assert_said(f"is not loaded: {shared_path} has nothing of its run", capfd)

    def test_that_of_a_branch_that_began_before_the_newest_checkpoint_is_left_alone(
        self, run, shared_path, capfd
    ):
        """A run has gone on from an older one, and has saved no checkpoint since."""
        run(ON_TP, 4)
        run(ON_TP, 5, "--ckpt-step", "2", "--save-interval", "10")
        self.lose(shared_path, 4)
        assert [record["step"] for record in run(ON_TP, 6)] == [5, 6]
        assert_said(f"does not continue {shared_path}/iter_0000004", capfd)

    def test_files_of_ranks_that_a_node_no_longer_has_are_deleted(self, run, shared_path):
        run(ON_TP, 1)
        left = self.files(shared_path)[0].parents[1] / "7/iter_0000009_7_local.pt"
        if Utils.rank == 0:
            left.parent.mkdir()
            left.touch()
        dist.barrier()
        run(ON_TP, 3)
        assert not left.exists() and len(self.files(shared_path)) == 2

    def test_a_checkpoint_that_is_named_is_loaded(self, run, shared_path):
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        assert [record["step"] for record in run(ON_TP, 3, "--ckpt-step", "2")] == [3]

    def test_that_of_other_data_is_left_alone(self, run, shared_path, capfd):
        """Without it the run begins anew, so that it is not refused for what it would not load."""
        run(ON_TP, 1)
        self.lose(shared_path, 0)
        assert [record["step"] for record in run(ON_TP, 1, "--seed", "7")] == [1]
        assert_said("is not loaded: digits has other samples than when this was saved", capfd)

    def test_that_of_one_rank_alone_is_left_alone(self, run, shared_path, capfd):
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        if Utils.rank == 1:
            self.files(shared_path)[1].unlink()
        assert [record["step"] for record in run(ON_TP, 3)] == [3]
        assert_said("is not loaded: there is none on rank 1", capfd)

    def test_ranks_take_no_copies_of_different_attempts(self, run, shared_path, capfd):
        """Two attempts go on from one copy, to copies of one step; a rank has the other's file."""
        run(ON_TP, 1)
        kept, own = shared_path / "kept", shared_path / "own"
        self.once(lambda: shutil.copytree(own, kept / "step 1"))
        run(ON_TP, 3, "--save-interval", "4")
        self.lose(shared_path, 0)
        self.once(lambda: (own.rename(kept / "step 3"), (kept / "step 1").rename(own)))
        run(ON_TP, 3, "--save-interval", "4")
        self.lose(shared_path, 0)
        of_rank_1 = self.files(shared_path)[1]
        self.once(lambda: shutil.copy(kept / "step 3" / of_rank_1.relative_to(own), of_rank_1))
        assert [record["step"] for record in run(ON_TP, 1)] == [1]
        assert_said("is not loaded: ranks have files of different attempts", capfd)

    def test_a_checkpoint_without_an_attempt_is_told_from_none(
        self, run, shared_path, monkeypatch, capfd
    ):
        """One that another program has written, or an older version of this one."""

        def unmarked(self, args):
            init(self, args)
            del args.attempts

        init, aside = LocalCopies.__init__, shared_path / "aside"
        with monkeypatch.context() as patch:
            patch.setattr(LocalCopies, "__init__", unmarked)
            run(ON_TP, 2, copies=False)
        self.once(lambda: shutil.copytree(shared_path, aside))
        self.lose(shared_path, 0)
        run(ON_TP, 3, "--save-interval", "4")
        self.lose(shared_path, 0)
        self.once(lambda: shutil.copytree(aside, shared_path, dirs_exist_ok=True))
        assert [record["step"] for record in run(ON_TP, 3)] == [3]
        assert_said("is not loaded: it does not continue ", capfd)
        self.lose(shared_path, 2)
        assert [record["step"] for record in run(ON_TP, 4)] == [4]

    def test_a_checkpoint_that_cannot_be_read_is_named(self, run, shared_path, capfd):
        """Nothing else tells whether the copy continues it."""
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        self.once(lambda: os.truncate(shared_path / "iter_0000002/.metadata", 1000))
        with pytest.raises(UserError, match="damaged"):
            run(ON_TP, 3)
        assert_said(f"is not loaded: {shared_path}/iter_0000002 cannot be read", capfd)

    def test_one_that_is_left_alone_is_not_kept_in_memory(self, run, shared_path, monkeypatch):
        run(ON_TP, 3)
        self.lose(shared_path, 2)
        find, kept = LocalCopies.find, []

        def found(*arguments):
            copy = find(*arguments)
            gc.collect()
            kept.extend(isinstance(o, MCoreTensorAwareStateDict) for o in gc.get_objects())
            return copy

        monkeypatch.setattr(LocalCopies, "find", found)
        assert [record["step"] for record in run(ON_DP, 3)] == [3]
        assert kept and not any(kept)

    @pytest.mark.parametrize("lacks", ["a tensor", "what it is asked before all ranks exchange"])
    def test_what_does_not_fit_in_spite_of_all_ends_the_run(
        self, lacks, run, shared_path, monkeypatch
    ):
        """All ranks raise. Moments of Adam have been allocated, and are not trained on."""
        taken = MCoreTensorAwareStateDict.to_state_dict

        def lacking(self, asked, *rest, **named):
            if asked and Utils.rank == 1 and lacks == "a tensor":
                next(part for part in self._sharded_tensors if "exp_avg" in part.key).key = "none"
            elif asked and Utils.rank == 1:
                raise AssertionError("none")
            return taken(self, asked, *rest, **named)

        run(ON_TP, 1)
        self.lose(shared_path, 0)
        monkeypatch.setattr(MCoreTensorAwareStateDict, "to_state_dict", lacking)
        with pytest.raises(UserError, match=f"not fit this run: rank 1: .*; delete {shared_path}"):
            run(ON_TP, 2)

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
        assert_said("is not loaded: its file cannot be read on rank 1: ", capfd)
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

    @pytest.mark.parametrize("unwritable", ["attempt.txt", "own"])
    def test_the_first_that_cannot_be_written_does_not_end_the_run(
        self, unwritable, run, shared_path, capfd
    ):
        if unwritable == "own":  # a file in place of the folder
            self.once((shared_path / "own").touch)
        else:
            self.once((shared_path / "attempt.txt").mkdir)
        assert len(run(ON_TP, 2)) == 2
        assert_said("step 1 was not saved: rank 0: ", capfd)

    def test_a_run_that_ends_where_it_has_a_copy_saves_a_checkpoint(self, run, shared_path):
        with pytest.raises(SystemExit):
            run(ON_TP, 6, "--exit-interval", "3")
        dist.barrier()
        assert newest(shared_path) == 3


def same(records: list[dict]) -> list[tuple]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def assert_said(text: str, capfd, but_not: str = "\0") -> None:
    said = capfd.readouterr().err
    assert Utils.rank or (text in said and but_not not in said), said
