# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The picture at the end of a run: curves of loss and accuracy, and answers on test samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.loop.forward_step import Answers


@dataclass(frozen=True)
class Reading:
    """A held-out sample: its pictures beside each other [H, W, 3], the true answer, the model's."""

    strip: torch.Tensor
    answer: str
    read: str


def readings(source: SampleSource, answers: Answers, count: int) -> list[Reading]:
    """Return the first ``count`` samples with pictures that the model answered."""
    found = []
    for number in sorted({sample for sample, _ in answers}):
        if len(found) == count:
            break
        pictures = source.pictures("test", number)
        if not len(pictures):
            continue
        text = source.text("test", number)
        answer = source.words(text.labels[text.loss_mask.bool()].tolist())
        read = source.words([answers[place] for place in sorted(answers) if place[0] == number])
        found.append(Reading(_strip(pictures), answer, read))
    return found


def _strip(pictures: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put pictures [3, H, W] beside each other, with the first one's height; [H, W, 3] in 0 … 1."""
    height, resized = pictures[0].shape[1], []
    for picture in pictures:
        shape = height, max(1, round(picture.shape[2] * height / picture.shape[1]))
        resized.append(F.interpolate(picture[None] / 255, shape, mode="bilinear")[0])
    return torch.cat(resized, dim=-1).permute(1, 2, 0)


def draw_report(path: Path, records: list[dict], readings: list[Reading]) -> None:
    """Write a PNG of the run.

    Args:
        readings: test samples, drawn in a grid of four columns; wrong ones are titled in red.
    """
    rows = -(-len(readings) // 4)
    figure = plt.figure(figsize=(11, 3.2 + 1.1 * rows), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3.2, max(1.1 * rows, 0.1)])
    loss_axes, accuracy_axes = top.subplots(1, 2)
    _curve(loss_axes, records, {"loss": "train", "eval_loss": "held out"}, "loss per token")
    loss_axes.set_yscale("log")
    _curve(accuracy_axes, records, {"eval_accuracy": "held out"}, "accuracy of answers")
    if readings:
        for axes, reading in zip(bottom.subplots(rows, 4).flat, readings, strict=False):
            axes.imshow(reading.strip)
            wrong = reading.answer != reading.read
            title = f"read {reading.read}" + (f", is {reading.answer}" if wrong else "")
            axes.set_title(title, fontsize=9, color="crimson" if wrong else "black")
        for axes in bottom.axes:
            axes.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curve(axes, records: list[dict], names: dict[str, str], title: str) -> None:
    for key, label in names.items():
        known = (record for record in records if record.get(key) is not None)
        points = [(record["step"], record[key]) for record in known]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
