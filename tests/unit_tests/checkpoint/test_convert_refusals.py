# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of the converter: in words, by name, and before anything is written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit_tests.checkpoint.conversions import run_converter, tensors_of
from tests.unit_tests.checkpoint.hugging_face import save, whole_vlm

LAYERS = "language_model.backbone.layers"
SCALE = "vision_model.radio_model.model.blocks.1.layer_scale2.lambda1"
VALUES = {"n_group": 2, "mlp_hidden_act": "silu", "layer_norm_epsilon": 1e-6}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model of Hugging Face."""
    return save(whole_vlm(sound=False), tmp_path_factory.mktemp("model") / "theirs")


@pytest.fixture
def refusal(tmp_path, capsys) -> Callable[..., str]:
    """Runs the converter, and returns its refusal; asserts that nothing is written."""

    def run(*arguments: str | Path) -> str:
        assert run_converter(*arguments, "--out", tmp_path / "out") == 2
        assert not list(tmp_path.glob("out*"))
        return capsys.readouterr().err

    return run


def changed(source: Path, to: Path, tensors: dict | None = None, **config) -> Path:
    """Copy a model into one file, with tensors replaced (None removes one) and a changed config.

    Args:
        config: fields of parts of the configuration, by its field.
    """
    to.mkdir()
    kept = tensors_of(source) | (tensors or {})
    save_file({name: each for name, each in kept.items() if each is not None}, to / "a.safetensors")
    read = json.loads((source / "config.json").read_text())
    for part, values in config.items():
        read[part] |= values
    (to / "config.json").write_text(json.dumps(read))
    return to


@pytest.mark.parametrize(
    ("tensors", "config", "reasons"),
    [
        (
            {
                f"{LAYERS}.2.mixer.k_proj.weight": None,
                f"{LAYERS}.1.mixer.experts.7.up_proj.weight": None,
                f"{LAYERS}.0.mixer.in_proj.weight": torch.zeros(135, 32),
                f"{LAYERS}.0.norm.bias": torch.zeros(32),
            },
            {},
            [
                f"missing: {LAYERS}.1.mixer.experts.7.up_proj.weight [16, 32]",
                f"missing: {LAYERS}.2.mixer.k_proj.weight [16, 32]",
                f"surplus: {LAYERS}.0.norm.bias [32]",
                f"misshapen: {LAYERS}.0.mixer.in_proj.weight [135, 32], wanted [136, 32]",
            ],
        ),
        ({}, {"text_config": VALUES}, [f"{name} is {each}, and" for name, each in VALUES.items()]),
        (
            {SCALE: torch.full((32,), 0.5)},
            {},
            [f"has factors that ours lacks: {SCALE}"],
        ),
        ({}, {"vision_config": {"image_size": 20}}, ["is 20: ours takes multiples of 8 up to 32"]),
    ],
)
def test_all_that_does_not_fit_is_listed(model, refusal, tmp_path, tensors, config, reasons):
    source = changed(model, tmp_path / "wrong", tensors, **config)
    said = refusal("hf-to-megatron", "--vlm", source, "--model", "tiny")
    assert len(said.splitlines()) == len(reasons) + (len(reasons) > 1)
    for reason in reasons:
        assert reason in said


def test_a_checkpoint_of_another_size_is_refused_by_name(model, refusal, tmp_path, capsys):
    """The model lacks sound, which the converter leaves out."""
    given = ("--vlm", model, "--model", "tiny-omni", "--out", tmp_path / "ours")
    assert run_converter("hf-to-megatron", *given) == 0
    assert f"not in {model}, left out: sound\n" in capsys.readouterr().out
    like = changed(model, tmp_path / "like", text_config={"n_routed_experts": 4})
    said = refusal("megatron-to-hf", tmp_path / "ours", "--like", like)
    router = "language_model.module.decoder.layers.1.mlp.router.weight"
    assert f"release: misshapen: {router} [8, 32], wanted [4, 32]" in said
    said = refusal("megatron-to-hf", tmp_path / "ours/release", "--like", like)
    assert "without options and tokenizer: give the Hugging Face directory that" in said


def test_what_cannot_be_read_or_would_be_written_over_is_named(model, refusal, tmp_path, capsys):
    file = changed(model, tmp_path / "damaged") / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    words = "hf-to-megatron", "--vlm", file.parent
    assert refusal(*words).startswith(f"error: {file}: ")
    file.unlink()
    assert f"{file.parent}: no tensors of the model, which .safetensors" in refusal(*words)
    (file.parent / "config.json").write_text('{"model_type": "radio"}')
    assert "config.json: model_type is radio, wanted nemotron_h_omni" in refusal(*words)
    said = refusal("megatron-to-hf", tmp_path, "--like", model)
    assert f"{tmp_path}: no checkpoint of the program" in said
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    assert f"{tracker} names no step" in refusal("megatron-to-hf", tmp_path, "--like", model)
    assert "--model big: no preset" in refusal("hf-to-megatron", "--vlm", model, "--model", "big")
    assert run_converter("hf-to-megatron", "--vlm", model, "--out", tmp_path) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path} exists already\n"
