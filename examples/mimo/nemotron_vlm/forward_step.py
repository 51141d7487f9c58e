# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The forward step: the loss in training, what the model reads in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data.sample import FIRST_DIGIT
from megatron.core.models.mimo.encoding import run_microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_timers

LOSS, TOKENS, ACCURACY = "lm loss", "tokens", "digit accuracy"
"""Names in Megatron's log, the first as in its own programs."""

Answers = dict[tuple[int, int], int]
"""Token that was read, by sample and position."""

answers: Answers = {}
"""What this rank read in the last evaluation."""

Report = dict[str, torch.Tensor]


def forward_step(microbatches: Iterator[dict], model: MimoModel):
    """One microbatch of training or, where no gradient is asked for, of an evaluation.

    Returns:
        Losses or logits, and what makes the loss, the number of tokens and the report of them.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = dict(next(microbatches))
    timers("batch-generator").stop()
    samples = batch.pop("samples")
    if not torch.is_grad_enabled():
        return _read(batch, model, samples)
    losses, loss_mask = run_microbatch(model, batch)
    return losses, partial(_summed_loss, loss_mask=loss_mask, groups=model.pg_collection)


def _summed_loss(losses: torch.Tensor, loss_mask: torch.Tensor, groups):
    """A sum over tokens, divided by the global count afterwards.

    Args:
        losses: [b, S] loss of each token.
        loss_mask: [b, S].
    """
    total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    _validate(total)
    share = 1.0 / (get_num_microbatches() * groups.dp_cp.size())
    report = {
        LOSS: torch.stack([total.detach().double(), tokens.double()]),
        # Megatron reports a quotient of sums: over all reports the shares add up to 1.
        TOKENS: torch.stack([tokens.double(), torch.full_like(tokens, share).double()]),
    }
    return total, tokens.to(torch.int), report


def _validate(loss: torch.Tensor) -> None:
    """What Megatron's programs check of a loss, where it is asked for."""
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for what, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            machine.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"the loss of a microbatch is {what}",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=10.0, context="loss"),
            message="the loss of a microbatch is far above the ones before",
            tolerance=0.0,
            fatal=False,
        )


def _read(batch: dict, model: MimoModel, samples: list[int]):
    labels, positions = batch.pop("labels"), batch["position_ids"]
    logits, loss_mask = run_microbatch(model, batch)
    if model.partition_adapter is not None:
        lengths = model.partition_adapter.lengths(labels.size(1))
        labels, positions = (
            model.partition_adapter.shard_tokens(t, lengths) for t in (labels, positions)
        )
    return logits, partial(
        _count,
        asked=loss_mask.bool(),
        labels=labels,
        positions=positions,
        samples=samples,
        model=model,
    )


def _count(logits, asked, labels, positions, samples, model) -> tuple:
    tp_group = unwrap_model(model.language_model).pg_collection.tp
    answer_logits = gather_answer_logits(logits, asked, tp_group)
    read = answer_logits.argmax(-1)
    rows = [samples[row] for row in asked.nonzero()[:, 0].tolist()]
    places = zip(rows, positions[asked].tolist(), strict=True)
    answers.update(zip(places, read.tolist(), strict=True))
    loss, tokens, right, digits = count_answers(answer_logits, labels[asked])
    report = {LOSS: torch.stack([loss, tokens]), ACCURACY: torch.stack([right, digits])}
    return logits.new_zeros(()), asked.sum().to(torch.int), report


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
