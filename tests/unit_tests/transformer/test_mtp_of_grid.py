# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of multi-token prediction (MTP) of a model on a grid."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from tests.unit_tests.test_utilities import Utils, requires_world_size

LENGTH, WIDTH, WORDS = 8, 4, 8
WITH_LOSS = ((0, 5), (5, 7))
"""First and last token with a loss of each rank's sample; the first of all has no prediction."""


def gradient(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Gradient of the output layer's weight, before it is divided by the number of tokens.

    Args:
        hidden: ``[2 · tokens, samples, WIDTH]``, of the model and of the prediction.
        labels, mask: ``[samples, tokens]``.
        group: of a model on a grid.
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
        dp_cp_group=group,
    )
    (scaled * 0).sum().backward()
    return weight.grad


def of_two_ranks(with_loss, *group) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of two samples, summed over ranks that have one each, and on one rank."""
    rng = torch.Generator().manual_seed(4)
    hidden = torch.randn(2 * LENGTH, 2, WIDTH, generator=rng).to(Utils.device).requires_grad_()
    labels = torch.randint(WORDS, (2, LENGTH), generator=rng).to(Utils.device)
    mask = torch.zeros(2, LENGTH, device=Utils.device)
    for row, (first, last) in enumerate(with_loss):
        mask[row, first : last + 1] = 1
    own = slice(Utils.rank, Utils.rank + 1)
    found = gradient(hidden[:, own], labels[own], mask[own], *group)
    dist.all_reduce(found)
    return found, gradient(hidden, labels, mask, *group)


@requires_world_size(2)
def test_samples_of_a_model_on_a_grid_weigh_as_on_one_rank():
    Utils.initialize_distributed()
    torch.testing.assert_close(*of_two_ranks(WITH_LOSS, dist.group.WORLD))
