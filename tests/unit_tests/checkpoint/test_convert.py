# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face in the program: the same logits in any layout, and back unchanged."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.mimo.nemotron_vlm.model.encoders import Encoder
from examples.mimo.nemotron_vlm.model.encoders.sound import Sound
from tests.unit_tests.checkpoint.conversions import (
    INDEX,
    TOLERANCE,
    assert_back_again,
    assert_verified,
    convert,
    convert_once,
    tensors_of,
    write_files,
)
from tests.unit_tests.checkpoint.hugging_face import encoder, language_model, save, whole_vlm
from tests.unit_tests.checkpoint.program_logits import (
    BATCH,
    SAMPLES,
    RandomText,
    loading,
    program_logits,
)
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

SIDE = 4
"""Number of patches along a tile's side."""

TEXT, IMAGES_AND_TEXT = RandomText(), RandomText(tiles=2, tokens=(SIDE // 2) ** 2)

KINDS = {
    "language": (lambda: language_model().bfloat16(), TEXT),
    "vlm": (whole_vlm, IMAGES_AND_TEXT),
}
"""Models by the converter's option, in bf16 and in fp32, and samples for them."""


@torch.no_grad()
def their_logits(model: torch.nn.Module, source: RandomText = TEXT) -> torch.Tensor:
    """Logits of transformers' own class, which takes GPU kernels wherever they are installed.

    Images are normalized and cut into patches before.
    """
    given = {"input_ids": torch.stack([source.text("test", n).input_ids for n in range(SAMPLES)])}
    if source.count:
        tiles = torch.cat([source.tiles("test", number) for number in range(SAMPLES)]) / 255
        config = model.config.vision_config
        mean, std = (torch.tensor(v)[:, None, None] for v in (config.norm_mean, config.norm_std))
        patches = ((tiles - mean) / std).unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(len(tiles) * SIDE**2, -1)
        places = torch.tensor([[SIDE, SIDE]] * len(tiles))
        given |= {"pixel_values": patches, "image_grid_hw": places}
    given = {name: value.to(Utils.device) for name, value in given.items()}
    return model.to(Utils.device)(**given).logits.cpu()


@pytest.fixture(scope="module")
def language() -> Iterator[Path]:
    with Utils.shared_directory() as path:
        sizes = ("--model", "tiny", "--seed", "7")
        yield convert_once(path, KINDS["language"][0], *sizes, option="--language")


@pytest.fixture(scope="module")
def vlm() -> Iterator[Path]:
    with Utils.shared_directory() as path:
        yield convert_once(path, whole_vlm)


def weights(*options: str) -> dict[str, torch.Tensor]:
    """Weights of the program's model, by name."""
    with trainer(*BATCH, *options) as run:
        return {name: each.detach().clone() for name, each in run.stages[0].named_parameters()}


class TestOneRank:
    @requires_world_size(1)
    @pytest.mark.parametrize("kind", ["vlm", "language"])
    def test_logits_are_theirs_and_back_it_has_the_same_bits(self, kind, request):
        directory = request.getfixturevalue(kind)
        theirs = directory.with_name("theirs")
        assert len(list(theirs.glob("*.safetensors"))) > 1
        model, source = KINDS[kind]
        wanted = their_logits(model().float(), source)
        assert wanted.std() > 0.5
        ours = program_logits(*loading(directory), source=source)
        assert (ours - wanted).abs().max() <= TOLERANCE
        assert_verified(directory, theirs, {"vlm": "text image video"}.get(kind, "text"))
        assert_back_again(directory, theirs)

    @requires_world_size(1)
    @pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
    def test_parts_that_are_not_given_begin_as_the_program_would(
        self, is_known, tmp_path, monkeypatch
    ):
        """So do encoders that no model of Hugging Face has."""
        if not is_known:
            if HAVE_CUDA:
                pytest.skip("beside a GPU the converter is another process, which knows the sound")
            monkeypatch.setattr(Sound, "parts", Encoder.parts)
        theirs, ours = save(language_model(), tmp_path / "theirs"), tmp_path / "ours"
        given = ("--language", theirs, "--model", "tiny-omni", "--seed", "7", "--out", ours)
        said = convert("hf-to-megatron", *given)
        sound = "sound encoder, sound projector" if is_known else Sound.name
        assert f"initial weights of seed 7: encoder, projector, {sound}\n" in said
        loaded, fresh = (
            weights("--model", str(ours / "model.json"), *options)
            for options in (("--load", str(ours)), ("--seed", "7"))
        )
        for name, weight in fresh.items():
            is_given = name.startswith("language_model.")
            assert is_given or torch.equal(loaded[name], weight), name

    @requires_world_size(1)
    def test_an_encoder_alone_comes_back_with_the_same_bits(self, tmp_path):
        saved, directory = save(encoder(), tmp_path / "theirs"), tmp_path / "ours"
        given = ("--vision", saved, "--model", "tiny", "--out", directory)
        said = convert("hf-to-megatron", *given)
        assert "initial weights of seed 1234: language, projector" in said
        assert_back_again(directory, saved)

    @requires_world_size(1)
    def test_many_tensors_go_to_several_files_with_an_index(self, tmp_path):
        tensors = {f"layer.{n}": torch.full((100,), float(n)) for n in range(4)}
        tensors["layer.4"] = torch.zeros(1000)
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        write_files(tmp_path, sizes, lambda names: {n: tensors[n] for n in names}, limit=1000)
        index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        for name, tensor in tensors.items():
            assert torch.equal(load_file(tmp_path / index[name])[name], tensor)
        groups = [sorted(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))]
        assert sorted(groups) == [["layer.0", "layer.1"], ["layer.2", "layer.3"], ["layer.4"]]

    @requires_world_size(1)
    def test_parts_from_several_places(self, vlm, tmp_path):
        language, directory = save(language_model(), tmp_path / "language"), tmp_path / "ours"
        whole = vlm.with_name("theirs")
        projector = {
            name: each + 1 for name, each in tensors_of(whole).items() if name.startswith("mlp1.")
        }
        (tmp_path / "projector").mkdir()
        save_file(projector, tmp_path / "projector" / "a.safetensors")
        sources = ("--language", language, "--projector", tmp_path / "projector", "--vlm", whole)
        convert("hf-to-megatron", *sources, "--out", directory)
        assert_back_again(directory, language)
        convert("megatron-to-hf", directory, "--like", whole, "--out", tmp_path / "vlm")
        wanted = tensors_of(whole) | projector
        wanted |= {f"language_model.{name}": each for name, each in tensors_of(language).items()}
        for name, tensor in tensors_of(tmp_path / "vlm").items():
            assert torch.equal(tensor, wanted[name]), name
