# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Running the converter, and comparing what it wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-5
"""Absolute, of fp32 logits of the size of one."""

PROGRAM = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "convert.py"


def convert(*arguments: str | Path) -> str:
    """Run the converter's program; what it prints."""
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory."""
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(directory: Path, other: Path) -> None:
    """Names, types, shapes and bits of all tensors, and the configuration."""
    ours, theirs = tensors_of(directory), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert (directory / "config.json").read_bytes() == (other / "config.json").read_bytes()
