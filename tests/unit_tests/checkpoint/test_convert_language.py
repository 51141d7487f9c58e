# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A NemotronH of Hugging Face in the program: the same logits in any layout, and back unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.checkpoint.conversions import TOLERANCE, assert_same_bits, convert
from tests.unit_tests.checkpoint.hugging_face import language_model, save
from tests.unit_tests.checkpoint.program_logits import SAMPLES, RandomText, program_logits
from tests.unit_tests.test_utilities import Utils, requires_world_size


@torch.no_grad()
def their_logits() -> torch.Tensor:
    """Those of transformers' own class."""
    source = RandomText()
    ids = torch.stack([source.sample("test", number).input_ids for number in range(SAMPLES)])
    return language_model()(ids).logits


def assert_same_logits(directory: Path, *layouts: str) -> None:
    ours, theirs = program_logits(directory, *layouts, source=RandomText()), their_logits()
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() <= TOLERANCE


def converted(path: Path) -> Path:
    """A converted language model, made by the first rank."""
    if Utils.rank == 0:
        save(language_model(), path / "theirs")
        source = ("--language", path / "theirs", "--model", "tiny")
        convert("hf-to-megatron", *source, "--out", path / "ours")
    dist.barrier()
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


class TestEightRanks:
    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language"), [("tp=2,dp=4", "tp=2,pp=2,dp=2,ep=2"), ("tp=2", "cp=2,ep=4,etp=2")]
    )
    def test_logits_are_theirs_in_any_layout(self, shared_path, encoder, language):
        layouts = ("--encoder", encoder, "--language", language)
        assert_same_logits(converted(shared_path), *layouts)
