# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron's loop: runs go on as if nothing had happened; what is damaged or hostile
is refused."""

import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.nn import LayerNorm, RMSNorm

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import tiny
from megatron.core.dist_checkpointing import parallel_manifest
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.parallel_manifest import save_manifest
from megatron.core.dist_checkpointing.safe_loading import no_code_from_checkpoints
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.rerun_state_machine import Call, Caller
from megatron.training import checkpointing
from megatron.training.checkpointing import get_checkpoint_tracker_filename as tracker_of
from tests.unit_tests.examples.nemotron_vlm.loop.models import FEW_EXPERTS, TOLERANCE
from tests.unit_tests.examples.nemotron_vlm.loop.rows import (
    APART_ON_PP,
    ON_DP,
    ON_PP,
    ON_TP_ETP,
)
from tests.unit_tests.examples.nemotron_vlm.runs import Trainer, trainer
from tests.unit_tests.models.mimo.weights import assert_shards_equal, gather_weights
from tests.unit_tests.test_utilities import Utils, requires_world_size

BEFORE, AFTER = 2, 2
"""Steps before the save, and after it: the second one's loss depends on Adam's loaded state."""

SIZES = ("--global-batch-size", "16", "--micro-batch-size", "4")
FEW = (*FEW_EXPERTS, *SIZES)


def run_of(layout: tuple[str, str, tuple[str, ...]], *more: str, load: Path | None = None):
    encoder, language, options = layout
    loading = ("--load", str(load)) if load else ()
    line = (*FEW, "--encoder", encoder, "--language", language)
    return trainer(*line, *options, *loading, *more)


def losses(run: Trainer, steps: int) -> list[float]:
    return [run.train_step()["loss"] for _ in range(steps)]


@requires_world_size(4)
class TestLayouts:
    """Rows of rows.py go on in other layouts; here runs go on in their own, or with other parts."""

    @pytest.mark.parametrize(
        ("layout", "options"),
        [
            (ON_PP, ("--hidden-dropout", "0.2", "--bf16")),
            (ON_TP_ETP, ("--hidden-dropout", "0.2")),
            (APART_ON_PP, ("--hidden-dropout", "0.2")),
        ],
        ids=str,
    )
    def test_training_goes_on_to_the_last_bit(self, layout, options, shared_path):
        """The random states of stages and TP ranks differ, and each gets its own again. In bf16,
        parameter groups contain fp32 parameters too."""
        with run_of(layout, *options) as run:
            losses(run, BEFORE)
            run.save(shared_path)
            uninterrupted, drawn = losses(run, AFTER), torch.rand(1)
        with run_of(layout, *options, load=shared_path) as run:
            assert run.step == BEFORE
            assert losses(run, AFTER) == uninterrupted
            assert torch.equal(torch.rand(1), drawn)

    def test_saved_before_the_first_optimizer_step(self, shared_path, monkeypatch):
        """The run has skipped all its steps."""
        with run_of(ON_PP) as run:
            weights = gather_weights(run.stages)
            launch = run.optimizer.launch

            def launch_with_inf() -> None:
                launch()
                run.optimizer._launched = torch.ones(1 + len(run.optimizer.module_infos))

            monkeypatch.setattr(run.optimizer, "launch", launch_with_inf)
            assert run.train_step()["skipped"]
            run.save(shared_path)
            assert_shards_equal(run.stages, weights)
            monkeypatch.undo()
            uninterrupted = losses(run, AFTER)
        with run_of(ON_DP, load=shared_path) as run:
            assert losses(run, AFTER) == pytest.approx(uninterrupted, rel=TOLERANCE)


NONE = torch.empty(0, dtype=torch.uint8)
"""Extra state of an engine's norm without FP8."""


@contextmanager
def engine_norms(are_used: bool = True) -> Iterator[list[torch.Tensor | None]]:
    """Give norms an extra state, as the engine's have, unless they are PyTorch's; yield the states
    that they are to load."""
    loaded: list[torch.Tensor | None] = []
    with pytest.MonkeyPatch.context() as patch:
        for norm in (LayerNorm, RMSNorm) if are_used else ():
            patch.setattr(norm, "get_extra_state", lambda norm: NONE)
            patch.setattr(norm, "set_extra_state", lambda norm, given: loaded.append(given))
        yield loaded


@requires_world_size(1)
class TestExtraStates:
    """Transformer Engine's norms have an extra state and PyTorch's have none, but both
    implementations ask a checkpoint for a norm by the same name."""

    @pytest.mark.parametrize("saves_them", [False, True])
    def test_layers_with_them_and_layers_without_them_go_on_alike(self, saves_them, tmp_path):
        """Weights and the optimizer's state are loaded: the next steps are the same."""
        with engine_norms(saves_them), trainer(*SIZES) as run:
            run.train_step()
            run.save(tmp_path)
            saved, expected = gather_weights(run.stages), run.train_step()
        keys = FileSystemReader(tmp_path / "iter_0000001").read_metadata().state_dict_metadata
        assert any("norm" in key and "_extra_state" in key for key in keys) == saves_them
        with (
            engine_norms(not saves_them) as loaded,
            trainer(*SIZES, "--load", str(tmp_path)) as run,
        ):
            assert bool(loaded) == (not saves_them) and all(given is NONE for given in loaded)
            assert_shards_equal(run.stages, saved)
            assert run.train_step() == expected

    def test_a_weight_that_is_missing_is_refused_by_name(self, tmp_path):
        """The model has one layer more; its extra state is not missed."""
        with trainer(*SIZES) as run:
            run.save(tmp_path)
        language = tiny().language
        language = replace(language, hybrid_layer_pattern=language.hybrid_layer_pattern + "M")
        longer = replace(tiny(), name="longer", language=language)
        with engine_norms(), pytest.raises(UserError) as refusal:
            with trainer(*SIZES, "--load", str(tmp_path), "--finetune", preset=longer):
                pass
        assert re.search(r"layers\.8\.\S+ from model not in state dict", str(refusal.value))


class Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(directory: Path) -> Path:
    return max(directory.glob("*.distcp"), key=lambda file: file.stat().st_size)


DAMAGES = {
    "truncated shard": (lambda d: os.truncate(largest(d), 100), "damaged"),
    "flipped bit in a shard": (lambda d: flip(largest(d)), "has changed"),
    "missing shard": (lambda d: largest(d).unlink(), "missing"),
    "flipped bit in the metadata": (lambda d: flip(d / ".metadata"), "damaged"),
    "missing manifest": (lambda d: (d / "integrity.json").unlink(), "has no integrity.json"),
    "manifest of nothing": (lambda d: (d / "integrity.json").write_text("[]"), "is damaged"),
    "empty tracker": (lambda d: Path(tracker_of(d.parent)).write_text(""), "that is there: 1"),
}


def unreadable(path: str) -> str:
    raise OSError(path)


class TestRecords:
    def test_that_of_a_step_which_was_not_finite_can_be_loaded(self, tmp_path):
        """Megatron saves it with the checkpoint from which such a step is run again."""
        caller = Caller("grad norm", 1)
        rows = AtomRows(np.array([2]), np.array([0, 1]))
        plan = BatchPlan({"images": rows}, {"images": rows}, (3, 4))
        torch.save({"call": Call(caller, 1), "batch": {"batch_plan": plan}}, tmp_path / "record.pt")
        with no_code_from_checkpoints():
            found = torch.load(tmp_path / "record.pt", weights_only=False)
        assert found["call"] == Call(caller, 1)
        assert str(found["batch"]["batch_plan"]) == str(plan)


@requires_world_size(2)
class TestRefusals:
    """Refusals, which happen on every rank."""

    @pytest.fixture(scope="class")
    def whole(self) -> Iterator[Path]:
        with Utils.shared_directory() as path:
            with mock.patch.dict(os.environ), trainer(*FEW) as run:
                losses(run, 1)
                run.save(path)
            yield path

    @pytest.fixture
    def saved(self, whole, shared_path) -> Path:
        """A copy of the checkpoint, to be damaged."""
        if dist.get_rank() == 0:
            shutil.copytree(whole, shared_path, dirs_exist_ok=True)
        dist.barrier()
        return shared_path

    def assert_refused(self, saved: Path, text: str) -> None:
        with pytest.raises(UserError) as refusal, trainer(*FEW, "--load", str(saved)):
            pass
        assert text in str(refusal.value)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("kind", DAMAGES)
    def test_damaged(self, kind, saved):
        damage, text = DAMAGES[kind]
        if dist.get_rank() == 0:
            damage(saved / "iter_0000001")
        dist.barrier()
        self.assert_refused(saved, text)

    def test_of_a_disk_that_only_one_rank_sees(self, saved, monkeypatch):
        if dist.get_rank() == 1:
            monkeypatch.setattr(checkpointing, tracker_of.__name__, lambda path: f"{path}/none")
        self.assert_refused(saved, "ranks 1 do not see it")

    def test_a_manifest_of_what_a_rank_cannot_read_is_not_written(self, saved, monkeypatch):
        (saved / "iter_0000001" / "integrity.json").unlink(missing_ok=True)
        dist.barrier()
        if dist.get_rank() == 1:
            monkeypatch.setattr(parallel_manifest, "_compute_file_hash", unreadable)
        with pytest.raises(CheckpointingException, match="was not saved: cannot read"):
            save_manifest(str(saved / "iter_0000001"))
        dist.barrier()
        assert not (saved / "iter_0000001" / "integrity.json").exists()

    @pytest.mark.parametrize("part", [".metadata", "common.pt"])
    def test_hostile_files_run_no_code(self, saved, part):
        """The files' hashes are right; they are refused for what they would do."""
        whole, made = saved / "iter_0000001", saved / "made by the checkpoint"
        if dist.get_rank() == 0:
            if part == "common.pt":
                torch.save({"args": Touch(made)}, whole / part)
            else:
                (whole / part).write_bytes(pickle.dumps(Touch(made)))
        dist.barrier()
        save_manifest(str(whole))
        dist.barrier()
        self.assert_refused(saved, "")
        assert not made.exists()

    def test_the_newest_whole_one_is_loaded(self, saved):
        """A save that was cut short has files, and the list of checkpoints does not know it."""
        if dist.get_rank() == 0:
            shutil.copytree(saved / "iter_0000001", saved / "iter_0000002")
            (saved / "iter_0000002" / "metadata.json").unlink()
        dist.barrier()
        with trainer(*FEW, "--load", str(saved)) as run:
            assert run.step == 1
