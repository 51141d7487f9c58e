# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of the converter: in words, by name, and before anything is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.mimo.nemotron_vlm.model.presets import find_preset
from tests.unit_tests.checkpoint.conversions import program, run_converter, tensors_of
from tests.unit_tests.checkpoint.hugging_face import encoder, language_model, save


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    return save(language_model(), tmp_path_factory.mktemp("language"))


def changed(source: Path, to: Path, tensors: dict | None = None, **config) -> Path:
    """Copy a model into one file, with tensors replaced (None removes one) and a changed config."""
    to.mkdir()
    kept = tensors_of(source) | (tensors or {})
    save_file({name: each for name, each in kept.items() if each is not None}, to / "a.safetensors")
    read = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(read | config))
    return to


def refusal(capsys, *arguments: str | Path) -> str:
    """Return the converter's refusal, and assert that nothing is written."""
    out = Path(arguments[-1])
    assert run_converter(*arguments) == 2
    assert not list(out.parent.glob(f"{out.name}*"))
    return capsys.readouterr().err


def test_missing_surplus_and_misshapen_tensors_are_all_listed(language, tmp_path, capsys):
    layers = "backbone.layers"
    source = changed(
        language,
        tmp_path / "wrong",
        {
            f"{layers}.2.mixer.k_proj.weight": None,
            f"{layers}.1.mixer.experts.7.up_proj.weight": None,
            f"{layers}.0.mixer.in_proj.weight": torch.zeros(135, 32),
            "mtp.layers.0.norm.weight": torch.zeros(32),
        },
    )
    said = refusal(capsys, "hf-to-megatron", "--language", source, "--out", tmp_path / "out")
    assert said.splitlines() == [
        "error: the tensors do not fit",
        f"  {source}: missing: {layers}.1.mixer.experts.7.up_proj.weight [16, 32]",
        f"  {source}: missing: {layers}.2.mixer.k_proj.weight [16, 32]",
        f"  {source}: surplus: mtp.layers.0.norm.weight [32]",
        f"  {source}: misshapen: {layers}.0.mixer.in_proj.weight [135, 32], wanted [136, 32]",
    ]


def test_surplus_tensors_may_be_left_out_but_no_others(language, tmp_path, capsys):
    source = changed(language, tmp_path / "more", {"mtp.norm.weight": torch.zeros(32)})
    given = ("hf-to-megatron", "--language", source, "--model", "tiny")
    said = refusal(capsys, *given, "--leave-out", "*.weight", "--out", tmp_path / "out")
    assert "--leave-out fits what the model has: backbone.embeddings.weight" in said
    more = ("--leave-out", "mtp.*", "--out", tmp_path / "out")
    assert run_converter(*given, *more) == 0
    assert "not in our model, left out: mtp.norm.weight" in capsys.readouterr().out


def test_configurations_that_cannot_be_expressed_are_named(language, tmp_path, capsys):
    values = {"n_group": 2, "mlp_hidden_act": "silu", "layer_norm_epsilon": 1e-6}
    source = changed(language, tmp_path / "other", **values)
    said = refusal(capsys, "hf-to-megatron", "--language", source, "--out", tmp_path / "out")
    for name, value in values.items():
        assert f"{name} is {value}, and ours has " in said


def test_scales_of_the_encoder_must_be_one(tmp_path, capsys):
    save(encoder(), tmp_path / "encoder")
    name = "radio_model.model.blocks.1.layer_scale2.lambda1"
    source = changed(tmp_path / "encoder", tmp_path / "scaled", {name: torch.full((32,), 0.5)})
    given = ("hf-to-megatron", "--vision", source, "--model", "tiny")
    said = refusal(capsys, *given, "--out", tmp_path / "out")
    assert f"the encoder has factors that ours lacks: {name}" in said


def test_a_tile_is_of_whole_tokens_and_within_the_positions(tmp_path, capsys):
    source = save(encoder(), tmp_path / "encoder")
    given = ("hf-to-megatron", "--vision", source, "--model", "tiny", "--tile")
    for tile in (20, 40):
        said = refusal(capsys, *given, tile, "--out", tmp_path / "out")
        assert f"--tile {tile}: give a multiple of 8 up to 32" in said
    assert run_converter(*given, 24, "--out", tmp_path / "out") == 0
    assert find_preset(str(tmp_path / "out" / "model.json")).encoder.tile == 24


def test_sizes_that_are_none_are_refused(tmp_path, capsys):
    (tmp_path / "model.json").write_text('{"encoder": {}}')
    source = save(encoder(), tmp_path / "encoder")
    given = ("hf-to-megatron", "--vision", source, "--model")
    for model, reason in ((tmp_path / "model.json", "not a file of model"), ("big", "no preset")):
        said = refusal(capsys, *given, model, "--out", tmp_path / "out")
        assert f"--model {model}: {reason}" in said


def test_a_checkpoint_of_another_size_is_refused_by_name(language, tmp_path, capsys):
    given = ("--language", str(language), "--model", "tiny", "--out", str(tmp_path / "ours"))
    assert run_converter("hf-to-megatron", *given) == 0
    like = save(language_model(n_routed_experts=4), tmp_path / "like")
    back = ("megatron-to-hf", tmp_path / "ours", "--like", like)
    said = refusal(capsys, *back, "--out", tmp_path / "out")
    router = "language_model.module.decoder.layers.1.mlp.router.weight"
    assert f"release: misshapen: {router} [8, 32], wanted [4, 32]" in said


def test_a_damaged_file_is_named(language, tmp_path, capsys):
    source = changed(language, tmp_path / "damaged")
    file = source / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = refusal(capsys, "hf-to-megatron", "--language", source, "--out", tmp_path / "out")
    assert said.startswith(f"error: {file}: ")


def test_the_program_does_not_overwrite_what_exists(language, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")  # the converter finds the checkout itself
    given = ("--language", str(language), "--out", str(tmp_path))
    command = [sys.executable, program.__file__, "hf-to-megatron", *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: --out {tmp_path} exists already\n")


def test_a_missing_package_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    given = ("--language", str(tmp_path), "--out", str(tmp_path / "out"))
    assert program.main(["hf-to-megatron", *given]) == 2
    said = capsys.readouterr().err
    assert said == "error: safetensors is not installed: pip install 'transformers>=5.23'\n"


def test_files_without_a_checkpoint_are_refused(language, tmp_path, capsys):
    said = refusal(
        capsys, "megatron-to-hf", tmp_path, "--like", language, "--out", tmp_path / "out"
    )
    assert f"{tmp_path}: no checkpoint of the program" in said
