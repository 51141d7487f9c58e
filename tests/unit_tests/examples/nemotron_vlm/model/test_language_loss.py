# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The loss by flash-linear-attention's kernel, on GPUs; on a CPU PyTorch's stands in for it."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.model.language_loss import (
    HybridModelWithLossKernel,
    has_loss_kernel,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

TOKENS, SAMPLES, VOCABULARY = 6, 2, 8
HAS_KERNEL = HAVE_CUDA and has_loss_kernel()
NEEDS_KERNEL = pytest.mark.skipif(not HAS_KERNEL, reason="needs GPUs and the kernel")


def stand_in(logits, labels, process_group):
    assert process_group is None
    return F.cross_entropy(logits.float(), labels, reduction="none"), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(1, marks=requires_world_size(1)),
        pytest.param(2, marks=[requires_world_size(2), NEEDS_KERNEL]),
    ],
)
def test_loss_and_gradient_are_pytorchs(ranks, dtype, monkeypatch):
    """Each TP rank has a part of the vocabulary; a token without a label has no loss."""
    if not HAS_KERNEL:
        module = SimpleNamespace(cross_entropy_loss=stand_in)
        monkeypatch.setitem(sys.modules, "fla.modules.fused_cross_entropy", module)
        for name in ("fla", "fla.modules"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    Utils.initialize_distributed()
    draw = torch.Generator().manual_seed(3)
    whole = torch.randn(TOKENS, SAMPLES, VOCABULARY, generator=draw).to(Utils.device, dtype)
    labels = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=draw).to(Utils.device)
    labels[1, 2] = -100
    expected = whole.float().clone().requires_grad_()
    expected_loss = F.cross_entropy(expected.permute(1, 2, 0), labels, reduction="none")
    weights = torch.rand(SAMPLES, TOKENS, generator=draw).to(Utils.device)
    (weights * expected_loss).sum().backward()

    part = VOCABULARY // ranks
    held = slice(part * Utils.rank, part * Utils.rank + part)
    found = whole[..., held].clone().requires_grad_()
    model = SimpleNamespace(pg_collection=SimpleNamespace(tp=dist.group.WORLD))
    loss = HybridModelWithLossKernel.compute_language_model_loss(model, labels, found)
    (weights * loss).sum().backward()
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(found.grad, expected.grad[..., held].to(dtype))
