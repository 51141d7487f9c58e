# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Running the converter, and comparing what it wrote."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import convert as program
from examples.mimo.pretrain_nemotron_vlm import ALONE
from tests.unit_tests.checkpoint.hugging_face import save
from tests.unit_tests.examples.nemotron_vlm.loop.models import ENGINE
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

TOLERANCE = 1e-4 if HAVE_CUDA else 1e-5
"""Absolute tolerance of fp32 logits of the size of one; GPU kernels have their own exponentials."""


LAYERS = ENGINE if HAVE_CUDA else ()
"""Layers that load a converted checkpoint: on GPUs those that are the default."""

BATCH = ("--seq-length", "24", "--global-batch-size", "4", "--micro-batch-size", "1")
BATCH += ("--train-iters", "1", "--eval-iters", "1")


def loading(directory: Path) -> tuple[str, ...]:
    """Options that load a converted checkpoint."""
    model = ("--model", str(directory / "model.json"))
    return (*model, *LAYERS, "--pretrained-checkpoint", str(directory))


def run_converter(*arguments: str | Path) -> int:
    """Run the converter, which makes the groups of its model; return its exit code.

    The converter installs the CPU runtime: a process that has a GPU in use starts another for it.
    """
    Utils.destroy()
    words = list(map(str, arguments))
    if not HAVE_CUDA:
        return program.main(words)
    command = [sys.executable, program.__file__, *words]
    environment = os.environ | ALONE | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def convert(*arguments: str | Path) -> str:
    """Run the converter, which must succeed; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run_converter(*arguments) == 0
    return said.getvalue()


def convert_once(path: Path, model: Callable[[], torch.nn.Module], name: str) -> Path:
    """Convert a model on the first rank alone, by the encoders of the program's model ``name``;
    return the folder, beside which `theirs` lies."""
    with Utils.first_rank_first() as first:
        if first:
            theirs = save(model(), path / "theirs")
            convert("hf-to-megatron", "--vlm", theirs, "--model", name, "--out", path / "ours")
    return path / "ours"


def assert_back_again(checkpoint: Path, theirs: Path, kinds: str) -> str:
    """Assert that converting back gives theirs, bit for bit, with the same logits for these kinds
    of input; return what the converter prints."""
    back = theirs.with_name(f"{theirs.name}-back")
    said = convert("megatron-to-hf", checkpoint, "--like", theirs, "--out", back)
    ours, wanted = tensors_of(back), tensors_of(theirs)
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert (back / "config.json").read_bytes() == (theirs / "config.json").read_bytes()
    assert_verified(checkpoint, back, kinds)
    return said


def assert_verified(checkpoint: Path, theirs: Path, kinds: str) -> None:
    """Assert that ``verify`` finds the same logits for these kinds of input, and none beyond 0."""
    said = convert("verify", checkpoint, theirs)
    found = dict(re.findall(r"^(\w+): largest difference (\S+), ", said, re.MULTILINE))
    assert " ".join(found) == kinds and max(map(float, found.values())) <= 10 * TOLERANCE
    with contextlib.redirect_stderr(io.StringIO()) as error:
        assert run_converter("verify", checkpoint, theirs, "--tolerance", "0") == 2
    assert error.getvalue().startswith("error: the logits of text")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory."""
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
