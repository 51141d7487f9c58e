# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A NemotronH of Hugging Face in the program: the same logits in any layout, and back unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch
from transformers import NemotronHForCausalLM

from examples.mimo.common.errors import UserError
from tests.unit_tests.checkpoint.conversions import TOLERANCE, assert_back_again, convert
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
    """Logits of transformers' own class, which takes GPU kernels wherever they are installed."""
    source = RandomText()
    ids = torch.stack([source.text("test", number).input_ids for number in range(SAMPLES)])
    return model.to(Utils.device)(ids.to(Utils.device)).logits.cpu()


def assert_same_logits(directory: Path, *layouts: str) -> None:
    ours = program_logits(*loading(directory), *layouts, source=RandomText())
    theirs = their_logits(language_model())
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.fixture(scope="module")
def converted() -> Iterator[Path]:
    """A converted language model, made by the first rank; what it was made of is beside it."""
    with Utils.shared_directory() as path:
        with Utils.first_rank_first() as first:
            if first:
                theirs = save(language_model(), path / "theirs")
                given = ("--language", theirs, "--model", "tiny", "--seed", "7")
                convert("hf-to-megatron", *given, "--out", path / "ours")
        yield path / "ours"


def weights(*options: str) -> dict[str, torch.Tensor]:
    """Weights of the program's model, by name."""
    with trainer(*BATCH, *options) as run:
        return {name: each.detach().clone() for name, each in run.stages[0].named_parameters()}


class TestOneRank:
    @requires_world_size(1)
    def test_logits_are_theirs_and_back_it_has_the_same_bits(self, converted):
        theirs = converted.with_name("theirs")
        assert len(list(theirs.glob("*.safetensors"))) > 1
        assert_same_logits(converted)
        assert_back_again(converted, theirs)

    @requires_world_size(1)
    def test_bf16_weights_keep_their_bits(self, tmp_path):
        model = language_model().bfloat16()
        theirs, directory = save(model, tmp_path / "theirs"), tmp_path / "ours"
        convert("hf-to-megatron", "--language", theirs, "--model", "tiny", "--out", directory)
        ours = program_logits(*loading(directory), source=RandomText())
        assert (ours - their_logits(model.float())).abs().max() <= TOLERANCE
        assert_back_again(directory, theirs)

    @requires_world_size(1)
    def test_parts_that_are_not_given_begin_as_the_program_would(self, converted):
        model = ("--model", str(converted / "model.json"))
        fresh = weights(*model, "--seed", "7")
        loaded = weights(*model, "--load", str(converted))
        for name, weight in fresh.items():
            is_given = name.startswith("language_model.")
            assert is_given or torch.equal(loaded[name], weight), name

    @requires_world_size(1)
    def test_a_damaged_checkpoint_is_refused(self, converted, tmp_path):
        directory = copytree(converted, tmp_path / "damaged")
        (file,) = (directory / "release").glob("*.distcp")
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            stream.write(b"damage")
        with pytest.raises(UserError, match=f"the checkpoint is damaged: {file.name} has changed"):
            program_logits(*loading(directory), source=RandomText())


class TestTwoRanks:
    @requires_world_size(2)
    def test_a_trained_model_gives_its_logits_in_transformers(self, converted, shared_path):
        """Several ranks have written the checkpoint."""
        layouts = ("--encoder", "tp=2", "--language", "tp=2,ep=2,etp=1")
        with trainer(*BATCH, *loading(converted), *layouts, source=RandomText()) as run:
            run.train_step()
            run.save(shared_path / "trained")
        saved = ("--model", str(converted / "model.json"), "--load", str(shared_path / "trained"))
        ours = program_logits(*saved, *layouts, source=RandomText())
        with Utils.first_rank_first() as first:
            if not first:
                return
            back = ("--like", converted.with_name("theirs"), "--out", shared_path / "back")
            convert("megatron-to-hf", shared_path / "trained", *back)
            theirs = NemotronHForCausalLM.from_pretrained(shared_path / "back")
            assert (ours - their_logits(theirs)).abs().max() <= TOLERANCE
            assert (ours - their_logits(language_model())).abs().max() > 1e-3


class TestFourRanks:
    @requires_world_size(4)
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [("tp=2,dp=2", "tp=2,pp=2,dp=1,ep=2,etp=1"), ("tp=2", "cp=2,ep=2,etp=2")],
    )
    def test_logits_are_theirs_in_any_layout(self, converted, encoder, language):
        layouts = ("--encoder", encoder, "--language", language)
        assert_same_logits(converted, *layouts)
