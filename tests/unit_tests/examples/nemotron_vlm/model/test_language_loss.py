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
    leave_out_padding,
)
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

TOKENS, SAMPLES, VOCABULARY = 6, 2, 8


def stand_in(logits, labels, process_group):
    assert process_group is None
    return F.cross_entropy(logits.float(), labels, reduction="none"), None


@requires_world_size(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_pytorchs(dtype, monkeypatch):
    """A token without a label has no loss. With TP, rows on GPUs have the kernel."""
    if not (HAVE_CUDA and has_loss_kernel()):
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

    found = whole.clone().requires_grad_()
    model = SimpleNamespace(pg_collection=SimpleNamespace(tp=dist.group.WORLD))
    loss = HybridModelWithLossKernel.compute_language_model_loss(model, labels, found)
    (weights * loss).sum().backward()
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(found.grad, expected.grad.to(dtype))


@requires_world_size(2)
@pytest.mark.parametrize(
    "loss_of", [vocab_parallel_cross_entropy, fused_vocab_parallel_cross_entropy]
)
@pytest.mark.parametrize("words", [3, 5, 8])
def test_padded_rows_take_no_part(words, loss_of):
    """Rank 1 holds padding alone, some, or none."""
    Utils.initialize_distributed()
    draw, held = torch.Generator().manual_seed(3), VOCABULARY // 2
    rows = slice(held * Utils.rank, held * Utils.rank + held)
    whole = torch.randn(VOCABULARY, 16, generator=draw).to(Utils.device)
    hidden = torch.randn(TOKENS, SAMPLES, 16, generator=draw).to(Utils.device)
    labels = torch.randint(words, (TOKENS, SAMPLES), generator=draw).to(Utils.device)
    expected = whole[:words].clone().requires_grad_()
    logits = (hidden @ expected.t()).flatten(0, 1)
    F.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
    expected_grad = F.pad(expected.grad, (0, 0, 0, VOCABULARY - words))[rows]

    class Output(torch.nn.Module):
        output_size_per_partition = held

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(whole[rows].clone())

        def forward(self, hidden):
            return hidden @ self.weight.t(), None

    model = SimpleNamespace(
        pg_collection=SimpleNamespace(tp=dist.group.WORLD), output_layer=(layer := Output())
    )
    leave_out_padding(model, words)
    found, _ = layer(hidden)
    wholes = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(wholes, found.detach())
    read = torch.cat(wholes, -1).argmax(-1)
    assert read.flatten().equal(logits.argmax(-1))
    loss_of(found, labels, tp_group=dist.group.WORLD).sum().backward()
    near = 1e-5 if loss_of is vocab_parallel_cross_entropy else 1e-1  # rounds gradients to bf16
    torch.testing.assert_close(layer.weight.grad, expected_grad, atol=near, rtol=near)
    assert not layer.weight.grad[max(0, words - held * Utils.rank) :].any()
