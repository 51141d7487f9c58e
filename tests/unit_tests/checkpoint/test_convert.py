# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's VLMs in the program: tiles of one size, parts that they lack, and files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file

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
    convert_once,
    run_converter,
    their_logits,
    write_files,
)
from tests.unit_tests.checkpoint.hugging_face import whole_vlm
from tests.unit_tests.checkpoint.program_logits import (
    BATCH,
    LENGTH,
    SAMPLES,
    loading,
    program_logits,
)
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, requires_world_size

TILES = 2
"""Tiles of a sample."""

pytestmark = requires_world_size(1)


def given(images: Radio, is_cut: bool) -> Given:
    """Random text with tiles, whole or cut into patches."""
    rng, shape = torch.Generator().manual_seed(1), (TILES, 3, images.tile, images.tile)
    samples = []
    for _ in range(SAMPLES):
        ids = torch.randint(4, 64, (LENGTH,), generator=rng)
        ids[2 : 2 + int(images.rows(np.ones(TILES, int)).sum())] = IMAGE
        tiles = torch.randint(256, shape, generator=rng, dtype=torch.uint8)
        if is_cut:
            cut = "n c (h y) (w x) -> n h w (c y x)"
            tiles = rearrange(tiles, cut, y=images.patch, x=images.patch)
        samples.append((ids, {IMAGES: (np.ones(TILES), tiles)}))
    return Given(samples, token_ids={IMAGES: IMAGE}, vocab_size=64)


def mixed_vlm() -> torch.nn.Module:
    """A VLM whose language model is in 16 bits."""
    model = whole_vlm()
    model.language_model.bfloat16()
    return model


def weights(*options: str) -> dict[str, torch.Tensor]:
    """Weights of the program's model, by name."""
    with trainer(*BATCH, *options) as run:
        return {name: each.detach().clone() for name, each in run.stages[0].named_parameters()}


def test_tiles_have_their_logits_and_back_they_have_the_same_bits(tmp_path):
    directory = convert_once(tmp_path, mixed_vlm, "tiny")
    theirs = directory.with_name("theirs")
    assert len(list(theirs.glob("*.safetensors"))) > 1
    images = find_preset(str(directory / "model.json")).images
    with torch.no_grad():
        wanted = torch.stack(their_logits(mixed_vlm().float(), images, given(images, True)))
    assert wanted.std() > 0.5
    ours = program_logits(*loading(directory), source=given(images, False))
    assert (ours - wanted).abs().max() <= TOLERANCE
    assert_back_again(directory, theirs)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_parts_that_are_not_there_begin_as_the_program_would(
    is_known, tmp_path, monkeypatch, capsys
):
    """So do encoders that no model of Hugging Face has."""
    if not is_known:
        if HAVE_CUDA:
            pytest.skip("beside a GPU the converter is another process, which knows the sound")
        monkeypatch.setattr(Sound, "parts", Encoder.parts)
    whole_vlm().save_pretrained(tmp_path / "theirs")
    ours = tmp_path / "ours"
    words = "hf-to-megatron", "--vlm", tmp_path / "theirs", "--model", "tiny-omni", "--out", ours
    assert run_converter(*words) == 0
    sound = "sound encoder, sound projector" if is_known else Sound.name
    assert f"initial weights: {sound}\n" in capsys.readouterr().out
    model = "--model", str(ours / "model.json")
    loaded, fresh = weights(*model, "--load", str(ours)), weights(*model)
    for name, weight in fresh.items():
        assert torch.equal(loaded[name], weight) == (".sound." in name), name


def test_many_tensors_go_to_several_files_with_an_index(tmp_path):
    tensors = {f"layer.{n}": torch.full((100,), float(n)) for n in range(4)}
    tensors["layer.4"] = torch.zeros(1000)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    write_files(tmp_path, sizes, lambda names: {n: tensors[n] for n in names}, limit=1000)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index[name])[name], tensor)
    groups = [sorted(load_file(file)) for file in sorted(Path(tmp_path).glob("*.safetensors"))]
    assert sorted(groups) == [["layer.0", "layer.1"], ["layer.2", "layer.3"], ["layer.4"]]
