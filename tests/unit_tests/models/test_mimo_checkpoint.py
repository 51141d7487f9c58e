# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: save in one layout, go on in another; what is damaged or hostile is refused."""

import contextlib
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm import checkpoint
from examples.mimo.nemotron_vlm import run as program
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.placement import COLOCATED, NON_COLOCATED
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from tests.unit_tests.examples.nemotron_vlm.runs import TOLERANCE, trainer
from tests.unit_tests.models import mimo_models
from tests.unit_tests.models.weights import assert_shards_equal, gather_weights
from tests.unit_tests.test_utilities import requires_world_size

PRESET = replace(
    mimo_models.PRESET,
    encoder=replace(mimo_models.PRESET.encoder, layers=2),
    language=replace(mimo_models.PRESET.language, pattern="ME*M"),
)
"""With pp=2 the second stage has no experts."""

BEFORE, AFTER = 2, 3
"""Steps before the save, and after it."""

LAYOUTS = {
    "dp": (COLOCATED, "tp=2,dp=2", "dp=4,ep=2"),
    "tp-etp": (COLOCATED, "dp=4", "tp=2,dp=2,ep=4,etp=1"),
    "cp": (COLOCATED, "tp=4", "cp=2,dp=2,ep=2"),
    "pp": (COLOCATED, "dp=4", "pp=2,dp=2,ep=2"),
    "non-colocated-tp": (NON_COLOCATED, "tp=2", "tp=2,dp=1,ep=1"),
    "non-colocated-cp": (NON_COLOCATED, "pp=2,dp=1", "cp=2,dp=1,ep=2"),
    "non-colocated-pp": (NON_COLOCATED, "dp=2", "pp=2,dp=1"),
}

TARGETS = {
    "dp": ["dp", "tp-etp", "non-colocated-pp"],
    "tp-etp": ["cp", "non-colocated-cp"],
    "cp": ["pp", "non-colocated-tp"],
    "pp": ["pp", "dp", "non-colocated-cp"],
    "non-colocated-tp": ["non-colocated-tp", "dp", "non-colocated-pp"],
    "non-colocated-cp": ["non-colocated-cp", "pp", "non-colocated-tp"],
    "non-colocated-pp": ["tp-etp", "cp"],
}


def run_of(layout: str, *more: str):
    placement, encoder, language = LAYOUTS[layout]
    return trainer(
        *("--placement", placement, "--encoder", encoder, "--language", language),
        *("--global-batch-size", "16", "--micro-batch-size", "4", "--seq-length", "16"),
        *more,
        preset=PRESET,
    )


def losses(run, steps: int) -> list[float]:
    return [run.train_step()["loss"] for _ in range(steps)]


@requires_world_size(4)
class TestLayouts:
    @pytest.mark.parametrize("source", LAYOUTS)
    def test_training_goes_on_in_another_layout(self, source, shared_path):
        """The next losses are the uninterrupted run's, to the last bit in the same layout."""
        with run_of(source) as run:
            losses(run, BEFORE)
            checkpoint.save(run, shared_path)
            drawn = torch.rand(1)
            uninterrupted = losses(run, AFTER)
        for target in TARGETS[source]:
            with run_of(target) as run:
                checkpoint.load(run, shared_path)
                assert run.step == BEFORE
                if target == source:
                    assert torch.equal(torch.rand(1), drawn)
                    assert losses(run, AFTER) == uninterrupted, target
                else:
                    expected = pytest.approx(uninterrupted, rel=TOLERANCE)
                    assert losses(run, AFTER) == expected, target

    def test_at_least_twelve_pairs_are_tried(self):
        assert sum(len(targets) for targets in TARGETS.values()) >= 12

    @pytest.mark.parametrize(
        ("source", "target", "frozen"),
        [
            ("dp", "non-colocated-cp", "language"),
            ("non-colocated-pp", "non-colocated-pp", "language"),
            ("pp", "non-colocated-pp", "encoder,projector"),
            ("non-colocated-cp", "cp", "encoder"),
        ],
    )
    def test_training_goes_on_with_frozen_parts(self, source, target, frozen, shared_path):
        with run_of(source, "--freeze", frozen) as run:
            losses(run, BEFORE)
            checkpoint.save(run, shared_path)
            uninterrupted = losses(run, AFTER)
        with run_of(target, "--freeze", frozen) as run:
            checkpoint.load(run, shared_path)
            assert losses(run, AFTER) == pytest.approx(uninterrupted, rel=TOLERANCE)

    def test_saved_before_the_first_optimizer_step(self, shared_path, monkeypatch):
        """The run has skipped all its steps."""
        with run_of("pp") as run:
            weights = gather_weights(run.stages)
            monkeypatch.setattr(run.optimizer, "prepare_grads", lambda: True)
            assert run.train_step()["skipped"]
            checkpoint.save(run, shared_path)
            assert_shards_equal(run.stages, weights)
            monkeypatch.undo()
            uninterrupted = losses(run, AFTER)
        with run_of("dp") as run:
            checkpoint.load(run, shared_path)
            assert losses(run, AFTER) == pytest.approx(uninterrupted, rel=TOLERANCE)

    @pytest.mark.parametrize("layout", ["dp", "non-colocated-cp"])
    def test_saved_in_the_background_is_the_state_at_the_save(self, layout, shared_path):
        with run_of(layout) as run:
            losses(run, BEFORE)
            saved = gather_weights(run.stages)
            writer = checkpoint.CheckpointWriter(shared_path, asynchronous=True)
            writer.save(run)
            uninterrupted = losses(run, AFTER)
            writer.poll()
            writer.finish()
            assert checkpoint.newest(shared_path).name == f"step_{BEFORE:08d}"
        with run_of(layout) as run:
            checkpoint.load(run, shared_path)
            assert_shards_equal(run.stages, saved)
            assert losses(run, AFTER) == uninterrupted


class Touch:
    """Unpickled, it makes a file."""

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


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGES = {
    "truncated shard": (lambda d: os.truncate(largest(d), 100), "is damaged"),
    "flipped bit in a shard": (lambda d: flip(largest(d)), "is damaged"),
    "missing shard": (lambda d: largest(d).unlink(), "file missing"),
    "flipped bit in the metadata": (lambda d: flip(d / ".metadata"), ".metadata"),
    "missing manifest": (lambda d: (d / "integrity.json").unlink(), "manifest not found"),
    "damaged manifest": (lambda d: (d / "integrity.json").write_text("{"), "is damaged"),
    "manifest of nothing": (lambda d: (d / "integrity.json").write_text("[]"), "is damaged"),
    "no record": (lambda d: (d / "run.json").write_text("{"), "is damaged"),
    "record of nothing": (lambda d: (d / "run.json").write_text("[]"), "is damaged"),
    "other format": (lambda d: rewrite(d / "run.json", '"format": 1', '"format": 9'), "format 9"),
    "other model": (lambda d: rewrite(d / "run.json", '"test"', '"huge"'), "model huge"),
    "other seed": (lambda d: rewrite(d / "run.json", '"seed": 0', '"seed": 7'), "seed 7"),
}


@requires_world_size(2)
class TestRefusals:
    """What is refused leaves every weight as it is, on every rank."""

    @pytest.fixture
    def saved(self, shared_path) -> Path:
        with self.run() as run:
            losses(run, 1)
            checkpoint.save(run, shared_path)
        return shared_path

    @contextlib.contextmanager
    def run(self, preset=PRESET, more=()):
        arguments = ("--global-batch-size", "8", "--micro-batch-size", "4", "--seq-length", "16")
        with trainer(*arguments, *more, preset=preset) as run:
            yield run

    def assert_refused(self, saved: Path, text: str, preset=PRESET, more=()) -> None:
        with self.run(preset, more) as run:
            before = gather_weights(run.stages)
            with pytest.raises(UserError) as refusal:
                checkpoint.load(run, saved)
            assert text in str(refusal.value)
            assert "\n" not in str(refusal.value)
            assert_shards_equal(run.stages, before)
            assert run.step == 0

    def test_damaged_and_foreign(self, saved):
        whole = checkpoint.newest(saved)
        for number, (damage, text) in enumerate(DAMAGES.values()):
            copy = saved / f"copy{number}" / whole.name
            if dist.get_rank() == 0:
                shutil.copytree(whole, copy)
                damage(copy)
            dist.barrier()
            self.assert_refused(copy.parent, text)

    def test_rank_0_says_which_is_the_newest(self, saved, monkeypatch):
        """A rank that sees another directory, or a late one, loads what the others load."""
        if dist.get_rank() > 0:
            monkeypatch.setattr(checkpoint, "newest", lambda directory: None)
        with self.run() as run:
            checkpoint.load(run, saved)
            assert run.step == 1
            config = replace(run.config, save=saved, restart_from_latest=True)
            assert program._restarted(config).load == saved

    @pytest.mark.parametrize("placement", [COLOCATED, NON_COLOCATED])
    def test_of_another_shape(self, saved, placement):
        """Also where only the encoder's rank can see it."""
        wider = replace(PRESET, projector_ffn=64)
        self.assert_refused(saved, "does not fit this model", wider, ("--placement", placement))

    def test_goes_on_with_other_rates_and_steps(self, saved):
        with self.run(more=("--lr", "5e-3", "--min-lr", "1e-3", "--steps", "12")) as run:
            checkpoint.load(run, saved)
            record = run.train_step()
            assert record["lr"] == pytest.approx(4.93e-3, rel=1e-2)  # step 1 of a cosine of 12
            for leaf in run.optimizer._leaves:
                assert {group["max_lr"] for group in leaf.param_groups} == {5e-3}

    def test_a_hostile_common_state_runs_no_code(self, shared_path):
        made = shared_path / "made by the checkpoint"
        with self.run() as run:
            losses(run, 1)
            run.scheduler.state_dict = lambda: Touch(made)
            checkpoint.save(run, shared_path)
        if dist.get_rank() == 0 and made.exists():
            made.rmdir()  # copying it while saving made it
        dist.barrier()
        self.assert_refused(shared_path, "does not fit this model")
        assert not made.exists()

    @pytest.mark.parametrize("part", [".metadata", "common.pt"])
    def test_hostile_files_run_no_code(self, saved, part):
        """Their hashes are right; what is refused is what they would do."""
        whole, made = checkpoint.newest(saved), saved / "made by the checkpoint"
        if dist.get_rank() == 0:
            content = pickle.dumps(Touch(made))
            if part == "common.pt":
                torch.save({"scheduler": Touch(made)}, whole / part)
            else:
                (whole / part).write_bytes(content)
            (whole / "integrity.json").unlink()
            save_integrity_manifest(str(whole))
        dist.barrier()
        self.assert_refused(saved, "does not fit this model")
        assert not made.exists()
