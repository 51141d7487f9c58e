# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Per-token loss of the training step, and what an evaluation counts from the logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data.sample import FIRST_DIGIT


def summed_loss(
    losses: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The schedule's loss function: a sum over tokens, divided by the global count afterwards.

    Args:
        losses: [b, S] loss of each token.
        loss_mask: [b, S].

    Returns:
        The sum (scalar), the number of tokens (int scalar), and both, detached, as [2] float64.
    """
    total = (losses.float() * loss_mask).sum()
    tokens = loss_mask.sum()
    report = torch.stack([total.detach().double(), tokens.double()])
    return total, tokens.to(torch.int), report


def gather_answer_logits(
    logits: torch.Tensor, asked: torch.Tensor, tp_group: dist.ProcessGroup
) -> torch.Tensor:
    """Whole-vocabulary logits at the answer positions.

    Args:
        logits: [b, S, V/tp].
        asked: [b, S] bool, n true.

    Returns:
        [n, V] float32
    """
    part = logits[asked].float().contiguous()
    parts = [torch.empty_like(part) for _ in range(tp_group.size())]
    dist.all_gather(parts, part, group=tp_group)
    return torch.cat(parts, dim=-1)


def count_answers(answer_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss sum, tokens, right digits and digits of a microbatch, as [4] float64.

    Args:
        answer_logits: [n, V].
        labels: [n].
    """
    is_digit = (labels >= FIRST_DIGIT) & (labels < FIRST_DIGIT + 10)
    right = (answer_logits.argmax(-1) == labels) & is_digit
    loss = F.cross_entropy(answer_logits, labels, reduction="sum")
    tokens = torch.tensor(float(labels.numel()), device=labels.device)
    return torch.stack([loss, tokens, right.sum(), is_digit.sum()]).double()
