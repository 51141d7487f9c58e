# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of multi-token prediction, for which the training programs refuse it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from tests.unit_tests.test_utilities import Utils, requires_world_size

LENGTH, WIDTH, WORDS = 8, 4, 8
WITH_LOSS = ((0, 5), (5, 7))
"""First and last token with a loss of each rank's sample; the first of all has no prediction."""


def gradient(hidden: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Gradient of the output layer's weight, before it is divided by the number of tokens.

    Args:
        hidden: ``[2 · tokens, samples, WIDTH]``, of the model and of the prediction.
        labels, mask: ``[samples, tokens]``.
    """
    rng = torch.Generator().manual_seed(5)
    weight = torch.randn(WORDS, WIDTH, generator=rng).to(Utils.device).requires_grad_()
    config = SimpleNamespace(
        mtp_num_layers=1,
        mtp_detach_heads=False,
        mtp_loss_scaling_factor=1.0,
        calculate_per_token_loss=True,
    )
    scaled = process_mtp_loss(
        hidden,
        labels,
        mask,
        output_layer=lambda states, weight, **_: (F.linear(states, weight), None),
        output_weight=weight,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda labels, logits: F.cross_entropy(
            logits.permute(1, 2, 0), labels, reduction="none"
        ),
        config=config,
    )
    (scaled * 0).sum().backward()
    return weight.grad


LOCAL_COUNTS = "upstream scales each rank's loss by that rank's own numbers of tokens"


@requires_world_size(2)
@pytest.mark.parametrize(
    "with_loss",
    [
        WITH_LOSS[:1] * 2,
        pytest.param(WITH_LOSS, marks=pytest.mark.xfail(strict=True, reason=LOCAL_COUNTS)),
    ],
    ids=["alike", "apart"],
)
def test_samples_on_two_ranks_weigh_as_on_one(with_loss):
    """They do if equally many tokens of each have a loss, and must whatever their number."""
    Utils.initialize_distributed()
    rng = torch.Generator().manual_seed(4)
    hidden = torch.randn(2 * LENGTH, 2, WIDTH, generator=rng).to(Utils.device).requires_grad_()
    labels = torch.randint(WORDS, (2, LENGTH), generator=rng).to(Utils.device)
    mask = torch.zeros(2, LENGTH, device=Utils.device)
    for row, (first, last) in enumerate(with_loss):
        mask[row, first : last + 1] = 1
    own = slice(Utils.rank, Utils.rank + 1)
    found = gradient(hidden[:, own], labels[own], mask[own])
    dist.all_reduce(found)
    torch.testing.assert_close(found, gradient(hidden, labels, mask))
