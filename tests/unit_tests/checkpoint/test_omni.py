# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 Nano Omni of transformers in the program: tiles, images of any size, video, sound."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from conversion import published, torch_dist
from conversion.published import Published, config_of
from conversion.verify import LEAST, Given, of_each_kind, our_logits, their_logits
from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.model.names import IMAGE, IMAGES
from examples.mimo.nemotron_vlm.model.presets import find_preset, nano_omni_30b_a3b, tiny_omni
from tests.unit_tests.checkpoint.conversions import (
    BATCH,
    LAYERS,
    TOLERANCE,
    assert_back_again,
    convert,
    convert_once,
    loading,
    tensors_of,
)
from tests.unit_tests.checkpoint.hugging_face import save, whole_vlm
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import apart
from tests.unit_tests.examples.nemotron_vlm.runs import DEVICE, trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

LENGTH = 64
"""Tokens of the longest sample, and padding."""


def conversations(directory: Path) -> tuple[Radio, Given]:
    """Return the encoder of images of a converted model, and a sample of each kind of input."""
    preset = find_preset(str(directory / "model.json")).with_images_of_any_size(LEAST)
    return preset.images, of_each_kind(preset, config_of(directory.with_name("theirs")))[1]


def their_loss(model: NemotronH_Omni_Reasoning_V3, images: Radio, source: Given) -> torch.Tensor:
    """The mean loss of all tokens of the samples."""
    labels = torch.cat([ids.roll(-1) for ids, _ in source.samples])
    return F.cross_entropy(torch.cat(their_logits(model, images, source)), labels)


LAYOUT = "--encoder images:tp=2 --encoder sound:dp=8 --language tp=2,cp=2,pp=2,dp=1,ep=2,etp=1"
APART = "--placement non-colocated --encoder images:tp=2,dp=1 --encoder sound:dp=1 --language dp=1"

SMALL = 1e-6
"""Added to a tensor's norm, as an expert without tokens has a gradient of zero."""

CONVERSATIONS = ("--seq-length", str(LENGTH), "--dynamic-resolution")
CONVERSATIONS += ("--dynamic-resolution-min-patches", str(LEAST))
CONVERSATIONS += ("--transformer-impl", "local")  # the engine has such images in 16 bits alone


@requires_world_size(1)
def test_every_kind_of_input_has_their_logits_and_back_it_has_the_same_bits(shared_path):
    """Video and sound are converted, not copied. Gradients and training prove layouts."""
    directory = convert_once(shared_path, whole_vlm, "tiny-omni")
    kinds = "text image video sound"
    copied = assert_back_again(directory, directory.with_name("theirs"), kinds)
    assert "video" not in copied and "sound_projection" not in copied


def mixed_vlm() -> NemotronH_Omni_Reasoning_V3:
    """A VLM whose language model is in 16 bits, with time steps below the released minimum."""
    model = whole_vlm()
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.data[0] = -6
    model.language_model.bfloat16()
    return model


@requires_world_size(1)
def test_tiles_have_their_logits_and_files_the_same_bits(tmp_path, monkeypatch):
    """Sound and video, which the chosen model lacks, are left out, and copied back."""
    for module in (published, torch_dist):
        monkeypatch.setattr(module, "FILE_BYTES", 50_000)  # larger than theirs, so fewer
    directory = convert_once(tmp_path, mixed_vlm, "tiny")
    assert HAVE_CUDA or len(list(directory.glob("release/*.distcp"))) > 1
    preset, rng = find_preset(str(directory / "model.json")), torch.Generator().manual_seed(1)
    images, sizes = preset.images, np.ones(2, int)
    ids = torch.randint(4, 64, (LENGTH,), generator=rng)
    ids[2 : 2 + int(images.rows(sizes).sum())] = IMAGE
    tiles = torch.randint(256, (len(sizes), 3, images.tile, images.tile), generator=rng).byte()
    patches = list(map(preset.with_images_of_any_size().images.grids.cut, tiles))
    whole, cut = (
        Given([(ids, {IMAGES: (sizes, each)})], token_ids={IMAGES: IMAGE}, vocab_size=64)
        for each in (tiles, patches)
    )
    with torch.no_grad():
        (wanted,) = their_logits(mixed_vlm().float(), images, cut)
    (ours,) = our_logits(directory, preset, whole, *DEVICE, *LAYERS)
    assert wanted.std() > 0.5 and (ours - wanted).abs().max() <= TOLERANCE
    copied = assert_back_again(directory, directory.with_name("theirs"), "text image")
    assert "video_embedder" in copied and "sound_projection" in copied
    if not HAVE_CUDA:
        index = json.loads((tmp_path / "theirs-back" / published.INDEX).read_text())["weight_map"]
        files = (tmp_path / "theirs-back").glob("*.safetensors")
        assert {*index.values()} == {file.name for file in files}


PLAIN = "--moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0 --lr 1e-3 --lr-decay-style constant"
PLAIN += " --no-use-distributed-optimizer --no-save-optim"
"""Options of a training that is PyTorch's own: no balancing, no schedule."""


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("", marks=requires_world_size(1)),
        pytest.param(APART, marks=requires_world_size(4)),
        pytest.param(LAYOUT, marks=requires_world_size(8)),
    ],
)
def test_training_is_that_of_plain_pytorch(layout, shared_path, record_property):
    """Gradients of a first step, tensor by tensor: the converter takes them for weights. Losses and
    gradient norms of five steps, with weight decay and clipping."""
    directory = convert_once(shared_path, whole_vlm, "tiny-omni")
    options = (*loading(directory), *CONVERSATIONS, *PLAIN.split(), *layout.split())
    images, source = conversations(directory)
    gradients: list[torch.Tensor] = []
    with trainer(*BATCH, *options, "--train-iters", "5", source=source) as run:
        weights = [weight for stage in run.stages for weight in stage.parameters()]

        @contextlib.contextmanager
        def first_step():
            yield
            gradients.extend(weight.main_grad.clone() for weight in weights)

        ours, args = [run.train_step(first_step), *(run.train_step() for _ in range(4))], run.args
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.copy_(gradient)
        run.save(shared_path / "gradients")
    with Utils.first_rank_first() as first:
        if not first:
            return
        like = ("--like", directory.with_name("theirs"), "--out", shared_path / "back")
        convert("megatron-to-hf", shared_path / "gradients", *like)
        model = whole_vlm()
        their_loss(model, images, source).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        found, wanted = (
            tensors_of(path)
            for path in (shared_path / "back", save(model, shared_path / "of transformers"))
        )
        theirs = trained_by_pytorch(whole_vlm(), args, len(ours), images, source)
    kept = {name.rpartition(".")[2] for name, _ in model.named_buffers()} | {"lambda1"}
    far = {
        name: float((found[name] - gradient).norm() / (gradient.norm() + SMALL))
        for name, gradient in wanted.items()
        if name.rpartition(".")[2] not in kept  # the scales of their layers are one
    }
    assert max(far.values()) <= 1e-4, {name: each for name, each in far.items() if each > 1e-4}
    assert theirs[-1]["loss"] < 0.95 * theirs[0]["loss"]
    largest = apart(ours, theirs) | {"gradient": max(far.values())}
    record_property("largest relative difference", largest)
    assert largest["loss"] <= TOLERANCE and largest["grad_norm"] <= 1e-3, largest


def trained_by_pytorch(
    model: NemotronH_Omni_Reasoning_V3, args, steps: int, images: Radio, source: Given
) -> list[dict]:
    """Train what is not frozen with AdamW; returns losses and gradient norms. The scales of layers
    stay one."""
    trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
    weights = {name: w for name, w in trained.items() if not name.endswith("lambda1")}
    decays = {name: w.ndim > 1 and not name.endswith(".bias") for name, w in weights.items()}
    groups = [
        {"params": [w for name, w in weights.items() if decays[name] is each], "weight_decay": rate}
        for each, rate in ((True, args.weight_decay), (False, 0.0))
    ]
    betas = args.adam_beta1, args.adam_beta2
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps)
    records = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = their_loss(model, images, source)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), args.clip_grad)
        optimizer.step()
        records.append({"loss": float(loss), "grad_norm": float(norm), "skipped": False})
    return records


RELEASED = {
    "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
    "auto_map": {"AutoConfig": "configuration.NemotronH_Nano_Omni_Reasoning_V3_Config"},
    "force_image_size": 512,
    "projector_hidden_size": 20480,
    "vision_config": {"video_temporal_patch_size": 2},
    "sound_config": {
        "model_type": "parakeet",
        "convolution_bias": False,
        "num_mel_bins": 128,
        "projection_hidden_size": 4096,
        "projection_bias": False,
    },
    "llm_config": {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688,
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
    },
}
"""Sizes in ``config.json`` of the released Nemotron 3 Nano Omni, by its names, that are not the
defaults of transformers' classes."""


@requires_world_size(1)
def test_the_preset_has_the_sizes_of_the_released_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    wanted, base = nano_omni_30b_a3b(), tiny_omni()
    found = Published(tmp_path, base).preset
    chosen = ("min_patches", "max_patches", "clip_patches")
    bounds = {name: getattr(base.images, name) for name in chosen}
    assert found.language == wanted.language
    assert found.images == replace(wanted.images, **bounds)
    assert found.encoders[1] == wanted.encoders[1]
