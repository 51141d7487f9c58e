# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The answers of ``--dry-run`` and ``--plan``, and the model on the meta device."""

import shlex

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options.command_line import read
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.report import answer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

pytestmark = pytest.mark.skipif(HAVE_CUDA, reason="a dry run's process has no GPU")

PUBLISHED = ("--model", "nano-vl-30b-a3b", "--data", "mock")
REAL = "--model nano-vl-30b-a3b --seq-length 8192"


@pytest.fixture
def alone(monkeypatch):
    """One rank without groups."""
    Utils.destroy()
    monkeypatch.setenv("WORLD_SIZE", "1")


def test_the_stages_of_a_layout_hold_the_published_model_between_them(alone):
    """31.6 B in total and 3.6 B active (Nemotron-3-Nano-30B-A3B's model card). No GPU is needed for
    the 16; ep=8 divides 29.84 B of experts, no shared ones or routers. Encoder and projector have
    0.8115 B, on each stage."""
    lines = answer(read([*PUBLISHED, "--dry-run"])).splitlines()
    (line,) = [line for line in lines if line.startswith("language model")]
    total, active = (float(text) for text in line.split() if text[0].isdigit())
    assert (round(total, 1), round(active, 1)) == (31.6, 3.6)
    layout = ("--language", "pp=2,ep=8", "--micro-batch-size", "1", "--device", "cuda")
    layout += ("--transformer-impl", "transformer_engine", "--cuda-graph-impl", "local")
    line = read([*PUBLISHED, *layout, "--dry-run", "16"])
    said, heads, *stages, host, _, step = answer(line).splitlines()
    assert "in fp32" in said and "the largest 31,744)" in said  # 31 tiles of 1024 patches
    assert heads.split()[:4] == "stage parameters gradients optimizer".split()
    assert step.startswith("predicted step of 4 microbatches")
    assert host.startswith("GiB of host memory for 8 ranks of a node: optimizer 0, a save ")
    held = [float(stage.split()[2]) * 2**30 / 4e9 for stage in stages]
    sharded = 23 * 128 * 2 * 2688 * 1856 / 1e9
    assert sum(held) == pytest.approx(31.5779 + 2 * 0.8115 - sharded * 7 / 8, rel=5e-3)


def planned(line: str) -> str:
    return answer(read(["--seq-length", "64", "--global-batch-size", "64", *line.split()]))


def test_a_plan_prints_a_command_with_all_that_was_planned_with(alone, tmp_path):
    """Also a file's options, but none that the plan decides."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "device: cuda\nbf16: true\nmodel: tiny-omni\nuse-precision-aware-optimizer: true\n"
        "main-params-dtype: fp16\nfreeze: encoder\nprompt: What is it?\n"
        "micro-batch-size: 8\nrecompute-granularity: selective\ndata: digits:1\n"
    )
    line = f"--plan 2 --plan-gpus-per-node 1 --config {file} --main-params-dtype fp32 --lr 1e-3"
    shown = planned(line)
    assert "tiny-omni on 2 GPUs, 1 a node" in shown and "--nnodes 2" in shown
    command = shlex.split(shown.partition("run it with\n")[2].replace("\\\n", ""))
    words = command[command.index("examples/mimo/pretrain_nemotron_vlm.py") + 1 :]
    args = Run.of([*words, "--dry-run", "2"], 2).args
    assert (args.model, args.freeze, args.lr) == ("tiny-omni", "encoder", 1e-3)
    assert args.prompt == "What is it?" and args.main_params_dtype == torch.float32
    assert args.use_precision_aware_optimizer and args.recompute_granularity is None
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert names.count("--micro-batch-size") == 1 and not {"--plan", "--config"} & set(names)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("--plan 8 --plan-gpu none", "--plan-gpu none"),
        ("--plan 8 --plan-gpus-per-node 0", "must be 1 or more"),
        (f"--plan 7 {REAL}", "no plan for 7 GPUs: the program's rules allow none; other GPUs"),
        (f"--plan 1 {REAL}", "none fits 141 GB; by this model 8 GPUs would do"),
        ("--plan 8 --data digits:99", "99 tiles a row .*: 396 tokens do not fit"),
        ("--plan 8 --language tp=2", "leave out --language"),
        ("--plan 8 --language planned --recompute-encoder=2", "out --recompute-encoder$"),
    ],
)
def test_a_plan_is_refused_in_one_line(line, reason, alone):
    with pytest.raises(UserError, match=reason):
        planned(line)
