# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face in the program: the same logits in any layout, and back unchanged."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file, save_file

from examples.mimo.nemotron_vlm.model.encoders import Encoder
from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.model.encoders.sound import Sound
from examples.mimo.nemotron_vlm.model.names import IMAGE, IMAGES
from examples.mimo.nemotron_vlm.model.presets import find_preset
from tests.unit_tests.checkpoint.conversions import (
    INDEX,
    TOLERANCE,
    Given,
    assert_back_again,
    assert_verified,
    convert,
    convert_once,
    tensors_of,
    their_logits,
    write_files,
)
from tests.unit_tests.checkpoint.hugging_face import encoder, language_model, save, whole_vlm
from tests.unit_tests.checkpoint.program_logits import (
    BATCH,
    LENGTH,
    SAMPLES,
    loading,
    program_logits,
)
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

KINDS = {"language": (lambda: language_model().bfloat16(), 0), "vlm": (whole_vlm, 2)}
"""Models by the converter's option, in bf16 and in fp32, and the tiles of samples for them."""


def given(count: int, images: Radio, is_cut: bool) -> Given:
    """Random text with ``count`` tiles, whole or cut into patches."""
    rng, shape = torch.Generator().manual_seed(1), (count, 3, images.tile, images.tile)
    samples = []
    for _ in range(SAMPLES):
        ids = torch.randint(4, 64, (LENGTH,), generator=rng)
        ids[2 : 2 + int(images.rows(np.ones(count, int)).sum())] = IMAGE
        tiles = torch.randint(256, shape, generator=rng, dtype=torch.uint8)
        if is_cut:
            cut = "n c (h y) (w x) -> n h w (c y x)"
            tiles = rearrange(tiles, cut, y=images.patch, x=images.patch)
        samples.append((ids, {IMAGES: (np.ones(count), tiles)}))
    return Given(samples, token_ids={IMAGES: IMAGE}, vocab_size=64)


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
        model, count = KINDS[kind]
        images = find_preset(str(directory / "model.json")).images
        with torch.no_grad():
            found = their_logits(model().float(), images, given(count, images, is_cut=True))
        wanted = torch.stack(found)
        assert wanted.std() > 0.5
        ours = program_logits(*loading(directory), source=given(count, images, is_cut=False))
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
