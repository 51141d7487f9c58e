# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A RADIO and a whole VLM of Hugging Face in the program: the same outputs, and back unchanged."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

import torch
from safetensors.torch import save_file

from examples.mimo.nemotron_vlm.model import IMAGES
from examples.mimo.nemotron_vlm.radio_encoder import pixel_shuffle
from megatron.core.utils import unwrap_model
from tests.unit_tests.checkpoint.conversions import (
    TOLERANCE,
    assert_same_bits,
    convert,
    tensors_of,
)
from tests.unit_tests.checkpoint.hugging_face import encoder, language_model, save, whole_vlm
from tests.unit_tests.checkpoint.program_logits import (
    BATCH,
    SAMPLES,
    TILE,
    RandomText,
    loading,
    program_logits,
)
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import Utils, requires_world_size

SIDE = 4
"""Patches of a tile."""

IMAGES_AND_TEXT = RandomText(tiles=2, tokens=(SIDE // 2) ** 2)


@torch.no_grad()
def their_logits() -> torch.Tensor:
    """Those of the published class, whose images are normalized and cut into patches before."""
    model = whole_vlm()
    texts = [IMAGES_AND_TEXT.text("test", number) for number in range(SAMPLES)]
    tiles = torch.cat([IMAGES_AND_TEXT.tiles("test", number) for number in range(SAMPLES)]) / 255
    config = model.config.vision_config
    mean, std = (torch.tensor(v)[:, None, None] for v in (config.norm_mean, config.norm_std))
    patches = (tiles - mean) / std
    patches = patches.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE).permute(0, 2, 3, 1, 4, 5)
    return model(
        input_ids=torch.stack([text.input_ids for text in texts]),
        pixel_values=patches.reshape(len(tiles) * SIDE**2, -1),
        image_grid_hw=torch.tensor([[SIDE, SIDE]] * len(tiles)),
    ).logits


def converted(path: Path) -> Path:
    """A converted VLM, made by the first rank."""
    with Utils.first_rank_first() as first:
        if first:
            save(whole_vlm(), path / "theirs")
            convert("hf-to-megatron", "--vlm", path / "theirs", "--out", path / "ours")
    return path / "ours"


def assert_same_logits(directory: Path, *layouts: str) -> None:
    ours = program_logits(*loading(directory), *layouts, source=IMAGES_AND_TEXT)
    assert (ours - their_logits()).abs().max() <= TOLERANCE


def weights(*options: str) -> dict[str, torch.Tensor]:
    """Of the program's model, by name."""
    with trainer(*BATCH, *options) as run:
        return {name: each.detach().clone() for name, each in run.stages[0].named_parameters()}


class TestOneRank:
    @requires_world_size(1)
    def test_features_of_the_encoder_are_theirs(self, shared_path):
        theirs = encoder()
        save(theirs, shared_path / "theirs")
        said = convert(
            "hf-to-megatron",
            *("--vision", shared_path / "theirs", "--model", "tiny", "--out", shared_path / "ours"),
        )
        assert "initial weights of seed 1234: language, projector" in said
        load = ("--model", str(shared_path / "ours" / "model.json"))
        tiles = torch.randint(256, (3, 3, TILE, TILE), dtype=torch.uint8)
        with trainer(*load, "--load", str(shared_path / "ours"), *BATCH) as run, torch.no_grad():
            module = unwrap_model(run.stages[0].modality_submodules[IMAGES])
            ours = module.encoders["radio"].eval()(tiles=tiles).clone()
        features = theirs(tiles / 255).features
        assert features.std() > 0.5
        wanted = pixel_shuffle(features, SIDE, 2).flatten(0, 1)
        assert (ours - wanted).abs().max() <= TOLERANCE

        back = ("--like", shared_path / "theirs", "--out", shared_path / "back")
        convert("megatron-to-hf", shared_path / "ours", *back)
        assert_same_bits(shared_path / "back", shared_path / "theirs")

    @requires_world_size(1)
    def test_a_whole_vlm_and_back(self, shared_path):
        directory = converted(shared_path)
        assert_same_logits(directory)
        back = ("--like", shared_path / "theirs", "--out", shared_path / "back")
        said = convert("megatron-to-hf", directory, *back)
        assert "video_embedder.weight" in said  # which ours does not have
        assert_same_bits(shared_path / "back", shared_path / "theirs")

        (shared_path / "config").mkdir()
        copyfile(shared_path / "theirs" / "config.json", shared_path / "config" / "config.json")
        like = ("--like", shared_path / "config", "--out", shared_path / "ours-only")
        convert("megatron-to-hf", directory, *like)
        theirs, ours = (tensors_of(shared_path / name) for name in ("theirs", "ours-only"))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        lacking = {name.rpartition(".")[2] for name in theirs.keys() - ours.keys()}
        assert lacking == {"lambda1", "summary_idxs", "weight"}  # the last is the video embedder's

    @requires_world_size(1)
    def test_parts_that_are_not_given_begin_as_the_program_would(self, shared_path):
        save(language_model(), shared_path / "theirs")
        given = ("--language", shared_path / "theirs", "--model", "tiny", "--seed", "7")
        convert("hf-to-megatron", *given, "--out", shared_path / "ours")
        model = ("--model", str(shared_path / "ours" / "model.json"))
        fresh = weights(*model, "--seed", "7")
        loaded = weights(*model, "--load", str(shared_path / "ours"))
        for name, weight in fresh.items():
            is_given = name.startswith("language_model.")
            assert is_given or torch.equal(loaded[name], weight), name

    @requires_world_size(1)
    def test_parts_from_several_places(self, shared_path):
        save(language_model(), shared_path / "language")
        save(whole_vlm(), shared_path / "vlm")
        projector = {
            name: tensor + 1
            for name, tensor in tensors_of(shared_path / "vlm").items()
            if name.startswith("mlp1.")
        }
        (shared_path / "projector").mkdir()
        save_file(projector, shared_path / "projector" / "a.safetensors")
        given = ("language", "projector", "vlm")
        sources = [word for part in given for word in (f"--{part}", shared_path / part)]
        convert("hf-to-megatron", *sources, "--out", shared_path / "ours")
        for like in ("language", "vlm"):
            back = ("--like", shared_path / like, "--out", shared_path / f"{like}-back")
            convert("megatron-to-hf", shared_path / "ours", *back)
        assert_same_bits(shared_path / "language-back", shared_path / "language")
        language = tensors_of(shared_path / "language").items()
        wanted = tensors_of(shared_path / "vlm") | projector
        wanted |= {f"language_model.{name}": tensor for name, tensor in language}
        for name, tensor in tensors_of(shared_path / "vlm-back").items():
            assert torch.equal(tensor, wanted[name]), name


class TestEightRanks:
    @requires_world_size(8)
    def test_logits_are_theirs_in_another_layout(self, shared_path):
        layouts = ("--encoder", "tp=2,dp=4", "--language", "tp=2,pp=2,dp=2,ep=2")
        assert_same_logits(converted(shared_path), *layouts)
