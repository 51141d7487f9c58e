# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of multi-token prediction (MTP) of a model on a grid."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.models.hybrid.mtp_of_grid import process_loss
from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from tests.unit_tests.test_utilities import Utils, requires_world_size

LENGTH, WIDTH, WORDS = 8, 4, 8
WITH_LOSS = ((0, 5), (5, 7))
"""First and last token with a loss of each rank's sample; the first of all has no prediction."""

OF_MODEL = dict(
    output_layer=lambda states, weight, **_: (F.linear(states, weight), None),
    compute_language_model_loss=lambda labels, logits: F.cross_entropy(
        logits.permute(1, 2, 0), labels, reduction="none"
    ),
    config=SimpleNamespace(
        mtp_num_layers=1,
        mtp_detach_heads=False,
        mtp_loss_scaling_factor=1.0,
        calculate_per_token_loss=True,
    ),
)


def of_grid(**batch) -> torch.Tensor:
    """The hidden states with the loss of a model on a grid."""
    groups = SimpleNamespace(cp=None)
    model = SimpleNamespace(**OF_MODEL, pg_collection=groups, training=False)
    return process_loss(model, packed_seq_params=None, input_ids=batch["labels"], **batch)


def of_upstream(**batch) -> torch.Tensor:
    """The hidden states with upstream's loss."""
    return process_mtp_loss(runtime_gather_output=None, is_training=False, **OF_MODEL, **batch)


def gradient(
    attach: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the output layer's weight, before it is divided by the number of tokens.

    Args:
        attach: attaches the loss to hidden states.
        hidden: ``[2 · tokens, samples, WIDTH]``, of the model and of the prediction.
        labels, mask: ``[samples, tokens]``.
    """
    rng = torch.Generator().manual_seed(5)
    weight = torch.randn(WORDS, WIDTH, generator=rng).to(Utils.device).requires_grad_()
    scaled = attach(hidden_states=hidden, labels=labels, loss_mask=mask, output_weight=weight)
    (scaled * 0).sum().backward()
    return weight.grad


def of_two_ranks(attach: Callable, with_loss: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of two samples, summed over ranks that have one each, and on one rank."""
    rng = torch.Generator().manual_seed(4)
    hidden = torch.randn(2 * LENGTH, 2, WIDTH, generator=rng).to(Utils.device).requires_grad_()
    labels = torch.randint(WORDS, (2, LENGTH), generator=rng).to(Utils.device)
    mask = torch.zeros(2, LENGTH, device=Utils.device)
    for row, (first, last) in enumerate(with_loss):
        mask[row, first : last + 1] = 1
    own = slice(Utils.rank, Utils.rank + 1)
    found = gradient(attach, hidden[:, own], labels[own], mask[own])
    dist.all_reduce(found)
    return found, gradient(attach, hidden, labels, mask)


@requires_world_size(2)
def test_samples_on_two_ranks_weigh_as_on_one():
    Utils.initialize_distributed()
    torch.testing.assert_close(*of_two_ranks(of_grid, WITH_LOSS))


@requires_world_size(2)
def test_the_loss_is_upstreams_where_all_later_tokens_have_one():
    """Then as many tokens have a loss of prediction as have one of the model."""
    Utils.initialize_distributed()
    later = ((1, 5), (5, 7))
    torch.testing.assert_close(of_two_ranks(of_grid, later), of_two_ranks(of_upstream, later))
