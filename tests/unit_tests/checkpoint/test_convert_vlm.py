# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A RADIO and a whole VLM of Hugging Face in the program: the same outputs, and back unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.mimo.nemotron_vlm.model import IMAGES
from examples.mimo.nemotron_vlm.vision import pixel_shuffle
from megatron.core.utils import unwrap_model
from tests.unit_tests.checkpoint.conversions import (
    INDEX,
    TOLERANCE,
    assert_back_again,
    convert,
    tensors_of,
    write_files,
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
"""Number of patches along a tile's side."""

IMAGES_AND_TEXT = RandomText(tiles=2, tokens=(SIDE // 2) ** 2)


@torch.no_grad()
def their_logits() -> torch.Tensor:
    """Logits of the published class; images are normalized and cut into patches before."""
    model = whole_vlm()
    texts = [IMAGES_AND_TEXT.text("test", number) for number in range(SAMPLES)]
    tiles = torch.cat([IMAGES_AND_TEXT.tiles("test", number) for number in range(SAMPLES)]) / 255
    config = model.config.vision_config
    mean, std = (torch.tensor(v)[:, None, None] for v in (config.norm_mean, config.norm_std))
    patches = (tiles - mean) / std
    patches = patches.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE).permute(0, 2, 3, 1, 4, 5)
    given = {
        "input_ids": torch.stack([text.input_ids for text in texts]),
        "pixel_values": patches.reshape(len(tiles) * SIDE**2, -1),
        "image_grid_hw": torch.tensor([[SIDE, SIDE]] * len(tiles)),
    }
    given = {name: value.to(Utils.device) for name, value in given.items()}
    return model.to(Utils.device)(**given).logits.cpu()


@pytest.fixture(scope="module")
def converted() -> Iterator[Path]:
    """A converted VLM, made by the first rank; what it was made of is beside it."""
    with Utils.shared_directory() as path:
        with Utils.first_rank_first() as first:
            if first:
                theirs = save(whole_vlm(), path / "theirs")
                convert("hf-to-megatron", "--vlm", theirs, "--out", path / "ours")
        yield path / "ours"


def assert_same_logits(directory: Path, *layouts: str) -> None:
    ours = program_logits(*loading(directory), *layouts, source=IMAGES_AND_TEXT)
    assert (ours - their_logits()).abs().max() <= TOLERANCE


class TestOneRank:
    @requires_world_size(1)
    def test_features_of_the_encoder_are_theirs(self, tmp_path):
        theirs = encoder()
        saved, directory = save(theirs, tmp_path / "theirs"), tmp_path / "ours"
        given = ("--vision", saved, "--model", "tiny", "--out", directory)
        said = convert("hf-to-megatron", *given)
        assert "initial weights of seed 1234: language, projector" in said
        load = ("--model", str(directory / "model.json"), "--load", str(directory))
        tiles = torch.randint(256, (3, 3, TILE, TILE), dtype=torch.uint8, device=Utils.device)
        with trainer(*load, *BATCH) as run, torch.no_grad():
            module = unwrap_model(run.stages[0].modality_submodules[IMAGES])
            ours = module.encoders["radio"].eval()(tiles=tiles).clone()
        features = theirs.to(Utils.device)(tiles / 255).features
        assert features.std() > 0.5
        wanted = pixel_shuffle(features, SIDE, 2).flatten(0, 1)
        assert (ours - wanted).abs().max() <= TOLERANCE
        assert_back_again(directory, saved)

    @requires_world_size(1)
    def test_a_whole_vlm_and_back(self, converted, tmp_path):
        assert_same_logits(converted)
        theirs = converted.with_name("theirs")
        said = assert_back_again(converted, theirs)
        assert "video_embedder.weight" in said  # our model has none

        (tmp_path / "config").mkdir()
        copyfile(theirs / "config.json", tmp_path / "config" / "config.json")
        like = ("--like", tmp_path / "config", "--out", tmp_path / "ours-only")
        convert("megatron-to-hf", converted, *like)
        ours, theirs = tensors_of(tmp_path / "ours-only"), tensors_of(theirs)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        lacking = {name.rpartition(".")[2] for name in theirs.keys() - ours.keys()}
        assert lacking == {"lambda1", "summary_idxs", "weight"}  # the last is the video embedder's

    @requires_world_size(1)
    def test_many_tensors_go_to_several_files_with_an_index(self, tmp_path):
        tensors = {f"layer.{n}": torch.full((100,), float(n)) for n in range(5)}
        sizes = {name: 400 for name in tensors} | {"layer.4": 4000}
        tensors["layer.4"] = torch.zeros(1000)
        write_files(tmp_path, sizes, lambda names: {n: tensors[n] for n in names}, limit=1000)
        index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        for name, tensor in tensors.items():
            assert torch.equal(load_file(tmp_path / index[name])[name], tensor)
        groups = [sorted(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))]
        assert sorted(groups) == [["layer.0", "layer.1"], ["layer.2", "layer.3"], ["layer.4"]]

    @requires_world_size(1)
    def test_parts_from_several_places(self, converted, tmp_path):
        language = save(language_model(), tmp_path / "language")
        vlm, directory = converted.with_name("theirs"), tmp_path / "ours"
        projector = {
            name: tensor + 1 for name, tensor in tensors_of(vlm).items() if name.startswith("mlp1.")
        }
        (tmp_path / "projector").mkdir()
        save_file(projector, tmp_path / "projector" / "a.safetensors")
        sources = ("--language", language, "--projector", tmp_path / "projector", "--vlm", vlm)
        convert("hf-to-megatron", *sources, "--out", directory)
        assert_back_again(directory, language)
        convert("megatron-to-hf", directory, "--like", vlm, "--out", tmp_path / "vlm")
        wanted = tensors_of(vlm) | projector
        wanted |= {f"language_model.{name}": each for name, each in tensors_of(language).items()}
        for name, tensor in tensors_of(tmp_path / "vlm").items():
            assert torch.equal(tensor, wanted[name]), name


class TestFourRanks:
    @requires_world_size(4)
    def test_logits_are_theirs_in_another_layout(self, converted):
        layouts = ("--encoder", "tp=2,dp=2", "--language", "tp=2,pp=2,dp=1,ep=2,etp=1")
        assert_same_logits(converted, *layouts)
