# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of logits that TP ranks share: right as training takes it, wrong in two other ways.

A wrong way is an expected failure: once upstream mends it, the test says so.
"""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megatron.core
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.unit_tests.test_utilities import Utils, requires_world_size

TOKENS, VOCABULARY = 6, 8


def unfused(logits, labels, **options):
    return vocab_parallel_cross_entropy(logits, labels, tp_group=dist.group.WORLD, **options)


def fused(logits, labels):
    return fused_vocab_parallel_cross_entropy(logits, labels, dist.group.WORLD)


def smoothed(logits, labels):
    return unfused(logits, labels, label_smoothing=0.2)


WRONG_UPSTREAM = "wrong in upstream's release and main, and called by nothing"


@requires_world_size(2)
@pytest.mark.parametrize(
    ("loss_of", "gathered", "smoothing"),
    [
        pytest.param(unfused, False, 0.0, id="unfused"),
        pytest.param(fused, False, 0.0, id="fused"),
        *(
            pytest.param(*row, marks=pytest.mark.xfail(strict=True, reason=WRONG_UPSTREAM), id=name)
            for *row, name in (
                (smoothed, False, 0.2, "smoothed"),
                (unfused, True, 0.0, "gathered"),
                (fused, True, 0.0, "fused, gathered"),
            )
        ),
    ],
)
def test_loss_and_gradient_are_those_of_one_rank(loss_of, gathered, smoothing):
    """Gathered logits are whole on every rank; smoothing spreads it over the other words."""
    Utils.initialize_distributed()
    rng = torch.Generator().manual_seed(3)
    whole = torch.randn(TOKENS, 1, VOCABULARY, generator=rng)
    whole, labels = whole.to(Utils.device), torch.arange(TOKENS, device=Utils.device)[:, None]
    target = F.one_hot(labels, VOCABULARY).float()
    target = torch.where(target > 0, 1 - smoothing, smoothing / (VOCABULARY - 1))
    expected = whole.clone().requires_grad_()
    expected_loss = -(target * expected.log_softmax(-1)).sum(-1)
    expected_loss.sum().backward()

    found = whole.clone().requires_grad_()
    held = slice(None) if gathered else slice(4 * Utils.rank, 4 * Utils.rank + 4)
    found_loss = loss_of(found[..., held].contiguous(), labels)
    found_loss.sum().backward()
    differences = [found_loss - expected_loss, (found.grad - expected.grad)[..., held]]
    largest = torch.stack([part.abs().max() for part in differences]).max().detach()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # so that all ranks say the same
    assert largest < (1e-2 if loss_of is fused else 1e-5)  # the fused gradient is rounded to bf16


def test_nothing_smooths_labels():
    """Neither upstream's code nor ours passes the loss of split logits a smoothing."""
    sources = Path(megatron.core.__file__).parents[1], Path(__file__).parents[3] / "examples"
    calls = [
        call
        for source in sources
        for path in source.rglob("*.py")
        if "vocab_parallel_cross_entropy" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).split(".")[-1] == "vocab_parallel_cross_entropy"
    ]
    assert calls
    for call in calls:
        assert len(call.args) == 2 and {word.arg for word in call.keywords} <= {"tp_group"}
