# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A NemotronH of Hugging Face in the program: the same logits in any layout, and back unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import NemotronHForCausalLM

from examples.mimo.nemotron_vlm.errors import UserError
from tests.unit_tests.checkpoint.conversions import TOLERANCE, assert_same_bits, convert
from tests.unit_tests.checkpoint.hugging_face import language_model, save
from tests.unit_tests.checkpoint.program_logits import (
    BATCH,
    SAMPLES,
    RandomText,
    loading,
    program_logits,
)
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import Utils, requires_world_size


@torch.no_grad()
def their_logits(model: NemotronHForCausalLM) -> torch.Tensor:
    """Those of transformers' own class."""
    source = RandomText()
    ids = torch.stack([source.text("test", number).input_ids for number in range(SAMPLES)])
    return model(ids).logits


def assert_same_logits(directory: Path, *layouts: str) -> None:
    ours = program_logits(*loading(directory), *layouts, source=RandomText())
    theirs = their_logits(language_model())
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() <= TOLERANCE


def converted(path: Path) -> Path:
    """A converted language model, made by the first rank."""
    with Utils.first_rank_first() as first:
        if first:
            save(language_model(), path / "theirs")
            source = ("--language", path / "theirs", "--model", "tiny")
            convert("hf-to-megatron", *source, "--out", path / "ours")
    return path / "ours"


class TestOneRank:
    @requires_world_size(1)
    def test_logits_are_theirs_and_back_it_has_the_same_bits(self, shared_path):
        directory = converted(shared_path)
        assert len(list((shared_path / "theirs").glob("*.safetensors"))) > 1
        assert_same_logits(directory)
        back = ("--like", shared_path / "theirs", "--out", shared_path / "back")
        convert("megatron-to-hf", directory, *back)
        assert_same_bits(shared_path / "back", shared_path / "theirs")

    @requires_world_size(1)
    def test_bf16_weights_keep_their_bits(self, shared_path):
        model = language_model().bfloat16()
        save(model, shared_path / "theirs")
        given = ("--language", shared_path / "theirs", "--model", "tiny")
        convert("hf-to-megatron", *given, "--out", shared_path / "ours")
        ours = program_logits(*loading(shared_path / "ours"), source=RandomText())
        assert (ours - their_logits(model.float())).abs().max() <= TOLERANCE
        back = ("--like", shared_path / "theirs", "--out", shared_path / "back")
        convert("megatron-to-hf", shared_path / "ours", *back)
        assert_same_bits(shared_path / "back", shared_path / "theirs")

    @requires_world_size(1)
    def test_a_damaged_checkpoint_is_refused(self, shared_path):
        directory = converted(shared_path)
        (file,) = (directory / "release").glob("*.distcp")
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            stream.write(b"damage")
        with pytest.raises(UserError, match=f"the checkpoint is damaged: {file.name} has changed"):
            program_logits(*loading(directory), source=RandomText())


class TestTwoRanks:
    @requires_world_size(2)
    def test_a_trained_model_gives_its_logits_in_transformers(self, shared_path):
        """From a checkpoint that several ranks have written."""
        directory = converted(shared_path)
        layouts = ("--encoder", "tp=2", "--language", "tp=2,ep=2,etp=1")
        with trainer(*BATCH, *loading(directory), *layouts, source=RandomText()) as run:
            run.train_step()
            run.save(shared_path / "trained")
        saved = ("--model", str(directory / "model.json"), "--load", str(shared_path / "trained"))
        ours = program_logits(*saved, *layouts, source=RandomText())
        with Utils.first_rank_first() as first:
            if not first:
                return
            back = ("--like", shared_path / "theirs", "--out", shared_path / "back")
            convert("megatron-to-hf", shared_path / "trained", *back)
            theirs = NemotronHForCausalLM.from_pretrained(shared_path / "back")
            assert (ours - their_logits(theirs)).abs().max() <= TOLERANCE
            assert (ours - their_logits(language_model())).abs().max() > 1e-3


class TestEightRanks:
    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language"), [("tp=2,dp=4", "tp=2,pp=2,dp=2,ep=2"), ("tp=2", "cp=2,ep=4,etp=2")]
    )
    def test_logits_are_theirs_in_any_layout(self, shared_path, encoder, language):
        layouts = ("--encoder", encoder, "--language", language)
        assert_same_logits(converted(shared_path), *layouts)
