# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The real size's parameter count, built on the meta device."""

from tests.e2e.launch import run


def test_the_language_model_has_the_published_parameters():
    """31.6 B in total and 3.6 B active (Nemotron-3-Nano-30B-A3B's model card)."""
    (end,) = run(1, "--model", "nano-vl-30b-a3b", "--dry-run", "--data", "mock", timeout_s=120)
    assert end.code == 0, end.errors
    (line,) = [line for line in end.output.splitlines() if line.startswith("language model")]
    total, active = (float(text) for text in line.split() if text[0].isdigit())
    assert (round(total, 1), round(active, 1)) == (31.6, 3.6)
