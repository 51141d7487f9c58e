# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Read held-out samples: loss, digit accuracy, and a few readings to look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.data.sample import FIRST_DIGIT
from examples.mimo.nemotron_vlm.loss import count_answers, gather_answer_logits
from examples.mimo.nemotron_vlm.trainer import Trainer
from megatron.core.models.mimo.encoding import with_embeddings


@dataclass(frozen=True)
class Reading:
    """A held-out sample: its tiles [n, 3, H, W], the true answer, and the one read."""

    tiles: torch.Tensor
    answer: str
    read: str


def evaluate(trainer: Trainer, samples: int) -> dict[str, float]:
    """Loss and digit accuracy over the first ``samples`` of the test split.

    Rounded up to whole batches; the same samples at every evaluation and in every layout.
    """
    batches = -(-samples // trainer.config.layouts.batch.global_size)
    reports = [report for step in range(batches) for report in _read(trainer, step)]
    loss, tokens, right, digits = trainer.total([r["counts"] for r in reports], 4)
    return {"eval_loss": loss / max(tokens, 1), "eval_accuracy": right / max(digits, 1)}


def read_samples(trainer: Trainer, count: int) -> list[Reading]:
    """What the model reads in the first test batch, up to ``count`` samples, on every rank."""
    reports = _read(trainer, 0)
    found: dict[tuple[int, int], int] = {}
    for number, report in enumerate(reports):
        _, indices = trainer.plan.indices(number)
        for row, position, token in report["read"].tolist():
            found[indices[row], position] = token
    everywhere: list[dict[tuple[int, int], int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    read = {place: token for part in everywhere for place, token in part.items()}
    shown = sorted({index for index, _ in read})[:count]
    return [_reading(trainer, i, [read[p] for p in sorted(read) if p[0] == i]) for i in shown]


@torch.no_grad()
def _read(trainer: Trainer, step: int) -> list[dict[str, torch.Tensor]]:
    for stage in trainer.stages:
        stage.eval()
    groups = trainer.language_groups
    forward_step = partial(_forward_step, tp_group=None if groups is None else groups.tp)
    return trainer.run_schedule(forward_step, "test", step, forward_only=True)


def _reading(trainer: Trainer, index: int, tokens: list[int]) -> Reading:
    sample = trainer.source.sample("test", 0, index)
    answer = sample.labels[sample.loss_mask.bool()].tolist()
    return Reading(sample.tiles, _digits(answer), _digits(tokens))


def _digits(tokens: list[int]) -> str:
    return "".join(
        str(t - FIRST_DIGIT) if FIRST_DIGIT <= t < FIRST_DIGIT + 10 else "?" for t in tokens[:-1]
    )


def _forward_step(microbatches, model, tp_group):
    batch = with_embeddings(model, next(microbatches))
    labels, positions = batch.pop("labels"), batch["position_ids"]
    logits, loss_mask = model(**batch)
    if model.partition_adapter is not None:
        lengths = model.partition_adapter.lengths(labels.size(1))
        labels, positions = (
            model.partition_adapter.shard_tokens(t, lengths) for t in (labels, positions)
        )
    asked = loss_mask.bool()
    places = torch.stack([asked.nonzero()[:, 0], positions[asked]], dim=-1)
    return logits, partial(
        _report, labels=labels[asked], places=places, asked=asked, tp_group=tp_group
    )


def _report(logits, labels, places, asked, tp_group):
    answer_logits = gather_answer_logits(logits, asked, tp_group)
    read = answer_logits.argmax(-1, keepdim=True)
    report = {
        "counts": count_answers(answer_logits, labels),
        "read": torch.cat([places, read], dim=-1),  # (sample in the microbatch, position, token)
    }
    return logits.new_zeros(()), asked.sum().to(torch.int), report
