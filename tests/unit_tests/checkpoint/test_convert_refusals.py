# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of the converter: in words, by name, and before anything is written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.mimo.nemotron_vlm.model.encoders.radio.weights import EMBEDDER
from examples.mimo.nemotron_vlm.model.presets import find_preset
from tests.unit_tests.checkpoint.conversions import program, run_converter, tensors_of
from tests.unit_tests.checkpoint.hugging_face import encoder, language_model, save

LAYERS = "backbone.layers"
SCALE = "radio_model.model.blocks.1.layer_scale2.lambda1"
VALUES = {"n_group": 2, "mlp_hidden_act": "silu", "layer_norm_epsilon": 1e-6}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Models by the converter's option."""
    path = tmp_path_factory.mktemp("models")
    made = {"language": language_model(), "vision": encoder()}
    return {f"--{part}": save(model, path / part) for part, model in made.items()}


@pytest.fixture
def refusal(tmp_path, capsys) -> Callable[..., str]:
    """Runs the converter, and returns its refusal; asserts that nothing is written."""

    def run(*arguments: str | Path) -> str:
        assert run_converter(*arguments, "--out", tmp_path / "out") == 2
        assert not list(tmp_path.glob("out*"))
        return capsys.readouterr().err

    return run


def changed(source: Path, to: Path, tensors: dict | None = None, **config) -> Path:
    """Copy a model into one file, with tensors replaced (None removes one) and a changed config."""
    to.mkdir()
    kept = tensors_of(source) | (tensors or {})
    save_file({name: each for name, each in kept.items() if each is not None}, to / "a.safetensors")
    read = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(read | config))
    return to


@pytest.mark.parametrize(
    ("option", "tensors", "config", "reasons"),
    [
        (
            "--language",
            {
                f"{LAYERS}.2.mixer.k_proj.weight": None,
                f"{LAYERS}.1.mixer.experts.7.up_proj.weight": None,
                f"{LAYERS}.0.mixer.in_proj.weight": torch.zeros(135, 32),
                "mtp.layers.0.norm.weight": torch.zeros(32),
            },
            {},
            [
                f"missing: {LAYERS}.1.mixer.experts.7.up_proj.weight [16, 32]",
                f"missing: {LAYERS}.2.mixer.k_proj.weight [16, 32]",
                "surplus: mtp.layers.0.norm.weight [32]",
                f"misshapen: {LAYERS}.0.mixer.in_proj.weight [135, 32], wanted [136, 32]",
            ],
        ),
        ("--language", {}, VALUES, [f"{name} is {value}, and" for name, value in VALUES.items()]),
        ("--vision", {SCALE: torch.full((32,), 0.5)}, {}, [f"factors that ours lacks: {SCALE}"]),
    ],
)
def test_all_that_does_not_fit_is_listed(
    models, refusal, tmp_path, option, tensors, config, reasons
):
    source = changed(models[option], tmp_path / "wrong", tensors, **config)
    said = refusal("hf-to-megatron", option, source, "--model", "tiny")
    assert len(said.splitlines()) == (1 if SCALE in tensors else 1 + len(reasons))
    for reason in reasons:
        assert reason in said


def test_surplus_tensors_may_be_left_out_but_no_others(models, refusal, tmp_path, capsys):
    more = {"mtp.norm.weight": torch.zeros(32)}
    source = changed(models["--language"], tmp_path / "more", more)
    given = ("hf-to-megatron", "--language", source, "--model", "tiny", "--leave-out")
    said = refusal(*given, "*.weight")
    assert "--leave-out fits what the model has: backbone.embeddings.weight" in said
    assert run_converter(*given, "mtp.*", "--out", tmp_path / "out") == 0
    assert "not in our model, left out: mtp.norm.weight" in capsys.readouterr().out


def test_sizes_that_do_not_fit_are_refused(models, refusal, tmp_path):
    """A tile is of whole tokens and within the positions."""
    sizes = tmp_path / "model.json"
    sizes.write_text('{"encoder": {}}')
    given = ("hf-to-megatron", "--vision", models["--vision"], "--model")
    for options, reason in (
        (("tiny", "--tile", "20"), "--tile 20: give a multiple of 8 up to 32"),
        (("tiny", "--tile", "40"), "--tile 40: give a multiple of 8 up to 32"),
        ((sizes,), f"--model {sizes}: not a file of model"),
        (("big",), "--model big: no preset"),
    ):
        assert reason in refusal(*given, *options)
    assert run_converter(*given, "tiny", "--tile", 24, "--out", tmp_path / "out") == 0
    assert find_preset(str(tmp_path / "out" / "model.json")).images.tile == 24


def test_a_checkpoint_of_another_size_is_refused_by_name(models, refusal, tmp_path, capsys):
    given = ("--language", models["--language"], "--model", "tiny", "--out", tmp_path / "ours")
    assert run_converter("hf-to-megatron", *given) == 0
    like = save(language_model(n_routed_experts=4), tmp_path / "like")
    said = refusal("megatron-to-hf", tmp_path / "ours", "--like", like)
    router = "language_model.module.decoder.layers.1.mlp.router.weight"
    assert f"release: misshapen: {router} [8, 32], wanted [4, 32]" in said
    said = refusal("megatron-to-hf", tmp_path / "ours", "--like", like, "--model", "tiny-omni")
    assert "release has encoders of images: give their --model, or none" in said
    said = refusal("megatron-to-hf", tmp_path / "ours/release", "--like", like)
    assert "without options and tokenizer: give --model, or" in said
    assert run_converter("verify", tmp_path / "ours/release", like, "--model", "tiny") == 2
    assert "give the directory that --load takes" in capsys.readouterr().err


def test_files_and_parts_that_cannot_be_read_are_named(models, refusal, tmp_path):
    names = [name for name in tensors_of(models["--vision"]) if name.endswith(".embedder.weight")]
    source = changed(models["--vision"], tmp_path / "none", dict.fromkeys(names))
    said = refusal("hf-to-megatron", "--vision", source, "--model", "tiny")
    assert said == f"error: {source}: no encoder: no tensor …{EMBEDDER}\n"
    file = changed(models["--language"], tmp_path / "damaged") / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = refusal("hf-to-megatron", "--language", file.parent)
    assert said.startswith(f"error: {file}: ")
    said = refusal("megatron-to-hf", tmp_path, "--like", models["--language"])
    assert f"{tmp_path}: no checkpoint of the program" in said


def test_a_directory_that_exists_and_a_missing_package_are_refused(
    models, tmp_path, monkeypatch, capsys
):
    given = ("hf-to-megatron", "--language", models["--language"], "--out")
    assert run_converter(*given, tmp_path) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path} exists already\n"
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    assert program.main(list(map(str, (*given, tmp_path / "out")))) == 2
    said = capsys.readouterr().err
    assert said == "error: safetensors is not installed: pip install 'transformers>=5.23'\n"
