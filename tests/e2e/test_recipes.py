# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Staged training by the recipes: from Hugging Face's weights, and back to them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.e2e.launch import CHECKOUT
from tests.unit_tests.checkpoint.conversions import convert, tensors_of
from tests.unit_tests.checkpoint.hugging_face import save, whole_vlm
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import make_digits, survey

RECIPES = CHECKOUT / "examples" / "mimo" / "recipes"

SHORT = (
    *("--train-iters", "6", "--global-batch-size", "4", "--seq-length", "64", "--seed", "7"),
    *("--save-interval", "3", "--pack-window", "32", "--eval-iters", "1", "--eval-interval", "6"),
    *("--save-retain-interval", "3"),
)


def recipe(name: str, ranks: int, *options: str, **places: Path) -> list[dict]:
    """Run a recipe to its end; return the records of its steps."""
    given = {name: str(path) for name, path in places.items()}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["examples/mimo/pretrain_nemotron_vlm.py", "--config", str(RECIPES / name)]
    command = [sys.executable, *launch, *program, *SHORT, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | given
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in (places["OUT"] / "metrics.jsonl").read_text().splitlines()]


def changed(directory: Path, other: Path) -> set[str]:
    """Return the parts of a VLM whose tensors differ."""
    ours, theirs = tensors_of(directory), tensors_of(other)
    names = {name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)}
    return {name.split(".")[0] for name in names}


def test_projector_first_then_all_parts_in_another_layout(tmp_path):
    """The first stage leaves frozen parts as they were, bit for bit; the second moves all parts."""
    save(whole_vlm(), tmp_path / "theirs")
    convert("hf-to-megatron", "--vlm", tmp_path / "theirs", "--out", tmp_path / "converted")
    make_digits(tmp_path / "digits", samples=96, seed=3)
    survey(tmp_path / "digits")
    places = {
        "WEIGHTS": tmp_path / "converted",
        "DATA": tmp_path / "digits",
        "TOKENIZER": tmp_path / "digits" / "tokenizer",
    }
    first = tmp_path / "first"
    aligned = recipe("align_projector.yaml", 1, OUT=first, **places)
    layouts = ("--encoder", "dp=2", "--language", "tp=2,ep=2,etp=1", "--lr", "1e-3")
    second = recipe("train_all.yaml", 2, *layouts, OUT=tmp_path / "second", ALIGNED=first, **places)
    for records in (aligned, second):
        assert [record["step"] for record in records] == list(range(1, 7))
    assert second[-1]["eval_loss"] < aligned[-1]["eval_loss"]
    written = (first / "config.yaml").read_text()
    assert "\nfreeze: encoder,language\n" in written and "\ntrain-iters: 6\n" in written

    for stage, parts in (
        ("first", {"mlp1"}),
        ("second", {"mlp1", "language_model", "vision_model"}),
    ):
        out = tmp_path / f"{stage}-back"
        like = ("--like", tmp_path / "theirs", "--out", out)
        convert("megatron-to-hf", tmp_path / stage / "checkpoints", *like)
        assert changed(out, tmp_path / "theirs") == parts
