# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The real size's parameter count, built on the meta device."""

import pytest

from tests.e2e.launch import run

MODEL = ("--model", "nano-vl-30b-a3b", "--data", "mock")


def test_the_language_model_has_the_published_parameters():
    """31.6 B in total and 3.6 B active (Nemotron-3-Nano-30B-A3B's model card)."""
    (end,) = run(1, *MODEL, "--dry-run")
    assert end.code == 0, end.errors
    (line,) = [line for line in end.output.splitlines() if line.startswith("language model")]
    total, active = (float(text) for text in line.split() if text[0].isdigit())
    assert (round(total, 1), round(active, 1)) == (31.6, 3.6)


def test_the_stages_of_a_layout_hold_the_model_between_them():
    """No GPU is needed for the 16; ep=8 divides 29.84 B of experts, no shared ones or routers."""
    layout = ("--language", "pp=2,ep=8", "--micro-batch-size", "1", "--device", "cuda")
    layout += ("--transformer-impl", "transformer_engine", "--cuda-graph-impl", "local")
    layout += ("--data", "mock")
    (end,) = run(1, *MODEL, "--dry-run", "16", *layout)
    assert end.code == 0, end.errors
    rows = [line.split() for line in end.output.splitlines() if "-" in line.split()[0]]
    assert [row[0] for row in rows] == ["0-7", "8-15"]
    encoder, projector, language = ([float(row[column]) for row in rows] for column in (1, 3, 5))
    assert encoder == [0.6516, 0.6516] and projector == [0.1599, 0.1599]
    sharded = 23 * 128 * 2 * 2688 * 1856 / 1e9
    assert sum(language) == pytest.approx(31.5779 - sharded * 7 / 8, abs=2e-3)
    heads, *stages = end.output.splitlines()[4:7]
    assert heads.split()[:4] == ["stage", "parameters", "gradients", "optimizer"]
    predicted = [float(line.split()[2]) for line in stages]
    held = [(e + p + n) * 4e9 / 2**30 for e, p, n in zip(encoder, projector, language, strict=True)]
    assert predicted == pytest.approx(held, rel=5e-3)  # fp32, to three digits
