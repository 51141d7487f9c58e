# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program's main file, before it imports Megatron."""

import os
import subprocess
import sys

import pytest
import torch

from examples.mimo.pretrain_nemotron_vlm import GPU_KERNELS, ROOT, share_gpus, uses_gpus


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


@pytest.mark.parametrize(("gpus", "local_rank"), [(4, "1"), (1, "0"), (0, "5")])
def test_ranks_share_the_gpus_of_a_host_that_has_fewer(gpus, local_rank, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    share_gpus()
    assert os.environ["LOCAL_RANK"] == local_rank


def test_cpu_ranks_leave_installed_gpu_kernels_alone(tmp_path):
    for name in GPU_KERNELS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('needs a GPU')")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    program = ROOT / "examples" / "mimo" / "pretrain_nemotron_vlm.py"
    done = subprocess.run(
        [sys.executable, program, "--device", "cpu", "--model", "tiny", "--dry-run", "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
