# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/user/walk.md, read from the page, at small sizes; with them the recipes."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image

from tests.e2e.launch import CHECKOUT, REPOSITORY, end_of, forked
from tests.ranks import run_ranks
from tests.unit_tests.checkpoint.conversions import convert, tensors_of
from tests.unit_tests.checkpoint.hugging_face import save, whole_vlm
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import make_digits

PAGE = (REPOSITORY / "docs/user/walk.md").read_text()

SMALL = {
    "source .venv/bin/activate; export OMP_NUM_THREADS=1\n": "",
    "--workers 16": "--workers 0",
    "nano-omni-30b-a3b": "tiny-omni",
    "--data digits:7": "--data digits:1",
    "--global-batch-size 128": "--global-batch-size 4",
    "--seq-length 4096": "--seq-length 64",
    "--dry-run 8 --device cuda --bf16": "--dry-run 8",
    "--device cuda --bf16 ": "",
    "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:29500": "",
    " --nproc-per-node 8": "",
    "--encoder dp=8 --language tp=2,ep=8,etp=1": "--encoder dp={ranks} --language tp=2,ep=2,etp=1",
    "--encoder dp=16 --language pp=2,ep=8,vpp=2": "--encoder dp=2 --language pp=2",
    "--train-iters 1000": "--train-iters 4",
    "--train-iters 5000": "--train-iters 4",
    "--save-interval 250": "--save-interval 2",
    "--save-retain-interval 1000": "--save-retain-interval 10",
    "--save-retain-interval 5000": "--save-retain-interval 10",
    "--eval-interval 250 --eval-iters 4": "--eval-interval 4 --eval-iters 1",
    "What is this?": "read <image>",
}
"""Texts of the page, and those that take their places at small sizes."""


def commands(block: str, data: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the variables and the words of each command of a block, at small sizes."""
    for real, other in SMALL.items():
        block = block.replace(real, other)
    block = block.replace("{ranks}", "8" if "--dry-run" in block else "2")
    block = re.sub(r"(?<!\w)/data/", f"{data}/", block)
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        variables = [word for word in words if re.match(r"[A-Z]+=", word)]
        yield dict(word.split("=", 1) for word in variables), words[len(variables) :]


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command in a process that has imported the modules that take seconds; return what it
    says. ``torchrun`` has two ranks."""
    output = folder / "said"
    output.unlink(missing_ok=True)
    code = end_of(forked(_process, words, environment, said=output, folder=folder))
    assert code == 0, f"{words}\n{output.read_text()[-4000:]}"
    return output.read_text()


def _process(words: list[str], environment: dict[str, str]) -> int | None:
    os.environ.update(environment)
    if words[0] == "torchrun":
        return run_ranks(2, _program, words[1:])
    return _program(words[1:] if "python" in words[0] else words)


def _program(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def changed(directory: Path, other: Path) -> set[str]:
    """Return the parts of a VLM whose tensors differ."""
    ours, theirs = tensors_of(directory), tensors_of(other)
    assert ours.keys() == theirs.keys()
    names = {name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)}
    return {name.split(".")[0] for name in names}


def test_published_weights_are_aligned_trained_and_exported(tmp_path):
    """The first stage leaves frozen parts as they were, bit for bit; the second moves all parts."""
    data = tmp_path / "data"
    save(whole_vlm(), data / "published")
    for name, seed in (("captions", 1), ("talks", 2)):
        make_digits(data / name, 48, seed, "--tasks", "omni")
    for file in (data / "talks/tokenizer").iterdir():
        (data / "published" / file.name).write_bytes(file.read_bytes())
    for name in ("tools", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    Image.new("RGB", (40, 20)).save(tmp_path / "photo.jpg")
    (tmp_path / "build").mkdir()
    (tmp_path / "build/Megatron-LM").symlink_to(CHECKOUT)
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert all(any(real in block for block in blocks) for real in SMALL)
    printed = []
    for variables, words in (each for block in blocks for each in commands(block, data)):
        said = run(words, tmp_path, variables)
        printed += re.findall("^ask it: (.*)", said, re.MULTILINE)
    # Each training prints a command, which needs no environment.
    _, command = printed
    options = {"cwd": tmp_path, "env": {"PATH": os.defpath}, "capture_output": True, "text": True}
    done = subprocess.run(shlex.split(command), **options)
    assert done.returncode == 0 and done.stdout, done.stderr
    for name in ("aligned", "all"):
        records = (data / name / "metrics.jsonl").read_text().splitlines()
        assert len(records) == 4 and "eval_loss" in json.loads(records[-1])
        kept = sorted(path.name for path in (data / name / "checkpoints").glob("iter_*"))
        assert kept == ["iter_0000004"], "the second step's is deleted"
    written = (data / "aligned/config.yaml").read_text()
    assert "\nfreeze: encoder,language\n" in written and "\ntrain-iters: 4\n" in written
    given = data / "aligned/checkpoints", "--like", data / "published", "--out", data / "back"
    convert("megatron-to-hf", *given)
    assert changed(data / "back", data / "published") == {"mlp1", "sound_projection"}
    assert changed(data / "mine", data / "published") == {
        *("mlp1", "sound_projection", "language_model", "vision_model", "sound_encoder")
    }
