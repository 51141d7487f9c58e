# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The model whose parameters are only counted."""

import pytest

from examples.mimo.nemotron_vlm.loop.dry_run import dry_run
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.planner.parameters import stages_on_meta
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

pytestmark = pytest.mark.skipif(HAVE_CUDA, reason="a dry run's process has no GPU")


def test_of_any_size_it_takes_no_memory():
    """Layers that name the current device take none either: 31.6 B parameters would be 118 GB."""
    Utils.destroy()
    options = parse(["--model", "nano-vl-30b-a3b", "--data", "mock", "--language", "ep=8"], 8)
    with stages_on_meta(options, 0) as (model,):
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_every_kind_of_layer_has_a_line(monkeypatch):
    """An MLP too, which no preset has."""
    Utils.destroy()
    monkeypatch.setenv("WORLD_SIZE", "1")
    printed = dry_run(["--hybrid-layer-pattern", "M-G*E-"], 1)
    for kind in ("Mamba-2", "gated delta nets", "attention", "MoE", "MLP"):
        assert f"\nlanguage: {kind}" in printed
