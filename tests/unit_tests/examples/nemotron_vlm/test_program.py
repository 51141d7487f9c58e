# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program's main file, before it imports Megatron."""

import pytest

from examples.mimo.pretrain_nemotron_vlm import uses_gpus


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("--device cuda --bf16", True),
        ("", False),
        ("--device cpu", False),
        ("--device", False),
        ("--dry-run --device cuda", False),
        ("--device cuda --dry-run 8", False),
        ("--plan 64 --device=cuda", False),
    ],
)
def test_only_training_on_gpus_sees_them(line, uses):
    assert uses_gpus(line.split()) is uses
