# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The model whose parameters are only counted, on the meta device."""

import pytest

from examples.mimo.nemotron_vlm.loop.dry_run import dry_run
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.options.fp8_rules import VIT, features_of_rank
from examples.mimo.nemotron_vlm.planner.parameters import stages_on_meta
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

pytestmark = pytest.mark.skipif(HAVE_CUDA, reason="a dry run's process has no GPU")

PUBLISHED = ("--model", "nano-vl-30b-a3b", "--data", "mock")


@pytest.fixture
def alone(monkeypatch):
    """One rank without groups."""
    Utils.destroy()
    monkeypatch.setenv("WORLD_SIZE", "1")


def test_of_any_size_it_takes_no_memory():
    """Layers that name the current device take none either: 31.6 B parameters would be 118 GB."""
    Utils.destroy()
    options = parse([*PUBLISHED, "--language", "ep=8"], 8)
    with stages_on_meta(options, 0) as (model,):
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_features_that_are_checked_for_fp8_are_those_of_its_layers():
    """The sizes differ from each other. Multi-token prediction takes two hidden states at once."""
    Utils.destroy()
    pattern = "M-G*E*/E*"
    sizes = "--hidden-size 80 --ffn-hidden-size 72 --moe-ffn-hidden-size 24 --kv-channels 12 "
    sizes += "--moe-shared-expert-intermediate-size 56 --encoder tp=2 --language tp=2,etp=4"
    line = f"--model tiny-gdn --hybrid-layer-pattern {pattern} {sizes}"
    options, held = parse(line.split(), 4), {"language_model": set(), "modality_submodules": set()}
    with stages_on_meta(options, 0) as (model,):
        for name, module in model.named_modules():
            if ".layers." in name and isinstance(module, ColumnParallelLinear | RowParallelLinear):
                held[name.partition(".")[0]].update(module.weight.shape)
    layouts, configs = options.layouts, options.configs
    counted = dict(features_of_rank(pattern, configs.language, layouts.language))
    assert held["language_model"] == {*counted.values(), 2 * 80} - {0}
    counted = dict(features_of_rank(VIT, configs.encoders[0]["encoder"], layouts.encoder))
    assert held["modality_submodules"] == {*counted.values()}


def test_every_kind_of_layer_has_a_line(alone):
    """An MLP too, which no preset has."""
    printed = dry_run(["--hybrid-layer-pattern", "M-G*E-"], 1)
    for kind in ("Mamba-2", "gated delta nets", "attention", "MoE", "MLP"):
        assert f"\nlanguage: {kind}" in printed


def test_each_encoder_has_its_parameters(alone):
    line = ["--model", "tiny-omni", "--data", "mock"]
    printed = dry_run(line, 1)
    assert "\nsound encoder" in printed and "\nimages projector" in printed
    layouts = ("--encoder", "images:dp=8", "--encoder", "sound:dp=8", "--language", "pp=2")
    heads = dry_run([*line, *layouts], 8).splitlines()[0]
    assert heads.split("  ")[1:] == [
        *("images encoder", "images projector", "sound encoder", "sound projector"),
        *("language", "sum"),
    ]


def test_the_stages_of_a_layout_hold_the_published_model_between_them(alone):
    """31.6 B in total and 3.6 B active (Nemotron-3-Nano-30B-A3B's model card). No GPU is needed for
    the 16; ep=8 divides 29.84 B of experts, no shared ones or routers."""
    lines = dry_run(list(PUBLISHED), 1).splitlines()
    (line,) = [line for line in lines if line.startswith("language model")]
    total, active = (float(text) for text in line.split() if text[0].isdigit())
    assert (round(total, 1), round(active, 1)) == (31.6, 3.6)
    layout = ("--language", "pp=2,ep=8", "--micro-batch-size", "1", "--device", "cuda")
    layout += ("--transformer-impl", "transformer_engine", "--cuda-graph-impl", "local")
    lines = dry_run([*PUBLISHED, *layout], 16).splitlines()
    rows = [line.split() for line in lines if "-" in line.split()[0]]
    assert [row[0] for row in rows] == ["0-7", "8-15"]
    encoder, projector, language = ([float(row[column]) for row in rows] for column in (1, 3, 5))
    assert encoder == [0.6516, 0.6516] and projector == [0.1599, 0.1599]
    sharded = 23 * 128 * 2 * 2688 * 1856 / 1e9
    assert sum(language) == pytest.approx(31.5779 - sharded * 7 / 8, abs=2e-3)
    heads, *stages = lines[4:7]
    assert heads.split()[:4] == ["stage", "parameters", "gradients", "optimizer"]
    predicted = [float(line.split()[2]) for line in stages]
    held = [(e + p + n) * 4e9 / 2**30 for e, p, n in zip(encoder, projector, language, strict=True)]
    assert predicted == pytest.approx(held, rel=5e-3)  # fp32, to three digits
