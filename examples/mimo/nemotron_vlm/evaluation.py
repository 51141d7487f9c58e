# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Read held-out samples: loss, digit accuracy, and a few readings to look at."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.data.sample import FIRST_DIGIT
from examples.mimo.nemotron_vlm.loss import count_answers, gather_answer_logits
from examples.mimo.nemotron_vlm.report import Reading
from examples.mimo.nemotron_vlm.trainer import Trainer


def evaluate(trainer: Trainer, samples: int) -> dict[str, float]:
    """Loss and digit accuracy over the first ``samples`` of the test split, rounded up to whole batches.

    The samples are the same at every evaluation and in every layout.
    """
    trainer.model.eval()
    batches = -(-samples // trainer.config.layouts.batch.global_size)
    reports = []
    with torch.no_grad():
        for step in range(batches):
            microbatches = trainer.plan.microbatches(
                trainer.source, "test", step, trainer.device
            )
            forward_step = partial(_forward_step, tp_group=trainer.language_groups.tp)
            reports += trainer.run_schedule(forward_step, microbatches, forward_only=True)
    loss, tokens, right, digits = trainer.total([r["counts"] for r in reports], 4)
    return {"eval_loss": loss / max(tokens, 1), "eval_accuracy": right / max(digits, 1)}


def read_samples(trainer: Trainer, count: int) -> list[Reading]:
    """What the model reads in the first test batch, up to ``count`` samples; whole on every rank."""
    trainer.model.eval()
    microbatches = trainer.plan.microbatches(trainer.source, "test", 0, trainer.device)
    forward_step = partial(_forward_step, tp_group=trainer.language_groups.tp)
    with torch.no_grad():
        reports = trainer.run_schedule(forward_step, microbatches, forward_only=True)
    found: dict[int, list[int]] = {}
    for number, report in enumerate(reports):
        _, indices = trainer.plan.indices(number)
        for row, token in zip(report["rows"].tolist(), report["read"].tolist(), strict=True):
            found.setdefault(indices[row], []).append(token)
    everywhere: list[dict[int, list[int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    read = {index: tokens for part in everywhere for index, tokens in part.items()}
    return [_reading(trainer, index, read[index]) for index in sorted(read)[:count]]


def _reading(trainer: Trainer, index: int, tokens: list[int]) -> Reading:
    sample = trainer.source.sample("test", 0, index)
    answer = sample.labels[sample.loss_mask.bool()].tolist()
    return Reading(sample.tiles, _digits(answer), _digits(tokens[: len(answer)]))


def _digits(tokens: list[int]) -> str:
    return "".join(
        str(t - FIRST_DIGIT) if FIRST_DIGIT <= t < FIRST_DIGIT + 10 else "?" for t in tokens[:-1]
    )


def _forward_step(microbatches, model, tp_group):
    batch = dict(next(microbatches))
    labels = batch.pop("labels")
    logits, loss_mask = model(**batch)
    return logits, partial(_report, labels=labels, loss_mask=loss_mask, tp_group=tp_group)


def _report(logits, labels, loss_mask, tp_group):
    answer_logits = gather_answer_logits(logits, loss_mask, tp_group)
    report = {
        "counts": count_answers(answer_logits, labels[loss_mask.bool()]),
        "rows": loss_mask.nonzero()[:, 0],
        "read": answer_logits.argmax(-1),
    }
    return logits.new_zeros(()), loss_mask.sum().to(torch.int), report
