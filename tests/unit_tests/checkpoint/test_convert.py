# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's VLMs in the program: tiles of one size, parts that they lack, and files."""

import json
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from safetensors.torch import load_file

from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.model.names import IMAGE, IMAGES
from examples.mimo.nemotron_vlm.model.presets import find_preset
from tests.unit_tests.checkpoint.conversions import (
    INDEX,
    LAYERS,
    TOLERANCE,
    Given,
    assert_back_again,
    assert_verified,
    convert,
    convert_once,
    our_logits,
    tensor_files,
    their_logits,
    torch_dist,
    write_files,
)
from tests.unit_tests.checkpoint.hugging_face import save, whole_vlm
from tests.unit_tests.examples.nemotron_vlm.runs import DEVICE
from tests.unit_tests.test_utilities import HAVE_CUDA, requires_world_size

SAMPLES, TILES, LENGTH = 4, 2, 24
"""Number of samples; tiles and tokens of a sample."""

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
    """A VLM whose language model is in 16 bits, with time steps below the released minimum."""
    model = whole_vlm(sound=True)
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.data[0] = -6
    model.language_model.bfloat16()
    return model


def test_tiles_have_their_logits_and_back_they_have_the_same_bits(tmp_path, monkeypatch):
    """Sound and video, which the chosen model lacks, are left out, and copied back."""
    for module in (tensor_files, torch_dist):
        monkeypatch.setattr(module, "FILE_BYTES", 20_000)
    directory = convert_once(tmp_path, mixed_vlm, "tiny")
    assert HAVE_CUDA or len(list(directory.glob("release/*.distcp"))) > 1
    preset = find_preset(str(directory / "model.json"))
    with torch.no_grad():
        wanted = their_logits(mixed_vlm().float(), preset.images, given(preset.images, True))
    ours = our_logits(directory, preset, given(preset.images, False), *DEVICE, *LAYERS)
    assert torch.stack(wanted).std() > 0.5
    assert (torch.stack(ours) - torch.stack(wanted)).abs().max() <= TOLERANCE
    copied = assert_back_again(directory, directory.with_name("theirs"))
    assert "video_embedder" in copied and "sound_projection" in copied
    assert_verified(directory, directory.with_name("theirs"), "text image")


def test_an_encoder_that_a_directory_lacks_is_left_out(tmp_path):
    ours, theirs = tmp_path / "ours", save(whole_vlm(), tmp_path / "theirs")
    said = convert("hf-to-megatron", "--vlm", theirs, "--model", "tiny-omni", "--out", ours)
    assert f"not in {theirs}, left out: sound\n" in said
    assert find_preset(str(ours / "model.json")).names == [IMAGES]


def test_many_tensors_go_to_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 1000)
    tensors = {f"layer.{n}": torch.full((100,), float(n)) for n in range(4)}
    tensors["layer.4"] = torch.zeros(1000)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    write_files(tmp_path, sizes, lambda names: {n: tensors[n] for n in names})
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index[name])[name], tensor)
    groups = [sorted(load_file(file)) for file in sorted(Path(tmp_path).glob("*.safetensors"))]
    assert sorted(groups) == [["layer.0", "layer.1"], ["layer.2", "layer.3"], ["layer.4"]]
