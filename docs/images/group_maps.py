# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Draw from the plans themselves which ranks form a group, and what each rank holds of a batch.

Usage, with the checkout on PYTHONPATH: python docs/images/group_maps.py
"""

import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from examples.mimo.common.layout import Layout
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.setup.module_groups import make_grid
from megatron.core.token_layout import contiguous_layout, pad_lengths, zigzag_layout

RANKS, STAGES = 16, 2
LANGUAGE = Layout(tp=2, cp=2, dp=2, pp=STAGES, ep=4, etp=1)
ENCODER = Layout(tp=2, dp=8, etp=2)

CP, LENGTHS = 4, [16, 24]
"""CP size and sample lengths in the picture of token layouts."""

SAMPLES, TOKENS = ("#5b8ff9", "#f6bd16", "#5ad8a6", "#e8684a"), 4
"""Colours of a batch's samples, each on a rank that encodes, and runs of tokens of each."""
ENCODES, READS = Layout(dp=4, etp=1), Layout(cp=2, pp=2, dp=1, etp=1)

COLUMNS = ("encodes", "after the bridge", "tokens under CP", "loss")
FORWARD = (
    "bridge\nbridge.py",
    "merge, zigzag\nembedding_merge.py, partition/adapter.py",
    "pipeline\nMegatron's schedules.py",
)
BACKWARD = (
    "gradient of encoded rows\nbridge/plan.py: backward",
    "gradient of own tokens\nmacro_batches.py: leaves",
    "pipeline\nMegatron's schedules.py",
)
WIDTH, GAP, HEIGHT = 4.0, 3.4, 1.0

COLOURS = plt.get_cmap("tab20").colors[::2] + plt.get_cmap("tab20").colors[1::2]


def pictures() -> dict[str, dict[str, list[list[int]]]]:
    """Return the ranks of each group, by file and by panel title."""
    os.environ["WORLD_SIZE"] = str(RANKS)  # grids must fit into this world
    language, encoder = make_grid(LANGUAGE, "gloo"), make_grid(ENCODER, "gloo")

    def experts(*dims: str) -> list[list[int]]:
        return language.get_rank_enum(list(dims), view="expert")

    return {
        "grids": {dim: language.get_rank_enum([dim]) for dim in ("tp", "cp", "dp", "pp")},
        "experts": {
            "dense: tp": language.get_rank_enum(["tp"]),
            "dense: dp": language.get_rank_enum(["dp"]),
            "experts: ep": experts("ep"),
            "experts: expt_dp": experts("expt_dp"),
        },
        "one-optimizer": {
            "encoder: dp": encoder.get_rank_enum(["dp"]),
            "language model: cp·dp": language.get_rank_enum(["cp", "dp"]),
            "experts: expt_dp": experts("expt_dp"),
            "norm, verdict": [list(range(RANKS))],
        },
        "balancing-losses": {
            "aux_loss, seq_aux_loss: tp·cp": language.get_rank_enum(["tp", "cp"]),
            "global_aux_loss: tp·cp·dp": language.get_rank_enum(["tp", "cp", "dp"]),
        },
    }


def draw_groups(name: str, panels: dict[str, list[list[int]]]) -> None:
    """Draw a panel for each kind of group: a row for each stage, a colour for each group."""
    columns = RANKS // STAGES
    figure, places = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 1.2))
    for axes, (title, members) in zip(places, panels.items(), strict=True):
        group_of = {rank: number for number, ranks in enumerate(members) for rank in ranks}
        for rank in range(RANKS):
            stage, column = divmod(rank, columns)
            _cell(axes, column, -stage, COLOURS[group_of[rank]], str(rank))
        _finish(axes, title, columns, STAGES)
    _save(figure, name)


def draw_tokens(name: str) -> None:
    """Draw a row for each token layout: two samples' tokens, coloured and named by CP rank."""
    lengths = pad_lengths(LENGTHS, CP)
    layouts = {
        "zigzag, for attention": zigzag_layout(lengths, CP),
        "contiguous, for recurrent layers": contiguous_layout(lengths, CP),
    }
    figure, places = plt.subplots(len(layouts), 1, figsize=(9, 1.7))
    for axes, (title, layout) in zip(places, layouts.items(), strict=True):
        for token, owner in enumerate((layout.places // layout.shard_size).tolist()):
            _cell(axes, token, 0, COLOURS[owner], str(owner))
        axes.axvline(LENGTHS[0], color="black", linewidth=2)
        _finish(axes, title, sum(LENGTHS), 1)
    _save(figure, name)


def held(rank: int) -> list[list[bool]]:
    """Return by column which runs of the batch's tokens the rank has."""
    topology = bridge_topology(make_grid(ENCODES, "gloo"), make_grid(READS, "gloo"))
    at, samples = topology.dest[rank], range(len(SAMPLES))
    encoded = set(topology.encodes(rank))
    consumed = set(topology.consumes(rank)) if at.pp == 0 else set()
    own = set(zigzag_layout(pad_lengths([TOKENS], READS.cp), READS.cp).tokens[at.cp].tolist())
    last = at.pp == READS.pp - 1
    return [
        [has(sample, token) for sample in samples for token in range(TOKENS)]
        for has in (
            lambda sample, _: sample in encoded,
            lambda sample, _: sample in consumed,
            lambda _, token: token in own,
            lambda _, token: token in own and last,
        )
    ]


def draw_batch(name: str) -> None:
    """Draw a row for each rank, and a column for each place on a batch's way."""
    ranks, step = len(SAMPLES), HEIGHT + 0.25
    os.environ["WORLD_SIZE"] = str(ranks)
    figure, axes = plt.subplots(figsize=(11, 4.4))
    left = [column * (WIDTH + GAP) for column in range(len(COLUMNS))]
    for rank in range(ranks):
        y = (ranks - 1 - rank) * step
        axes.text(-0.3, y + HEIGHT / 2, f"rank {rank}", ha="right", va="center", fontsize=9)
        for x, runs in zip(left, held(rank), strict=True):
            size = WIDTH / len(runs)
            for number in np.flatnonzero(runs):
                corner, colour = (x + number * size, y), SAMPLES[number // TOKENS]
                axes.add_patch(Rectangle(corner, size, HEIGHT, facecolor=colour, linewidth=0))
            axes.add_patch(Rectangle((x, y), WIDTH, HEIGHT, fill=False, edgecolor="#888888"))
    top, bottom = ranks * step, -0.35
    for x, title in zip(left, COLUMNS, strict=True):
        axes.text(x + WIDTH / 2, top - 0.15, title, ha="center", fontsize=10, weight="bold")
    for x, there, back in zip(left[1:], FORWARD, BACKWARD, strict=True):
        start, end = x - GAP - WIDTH / 2, x + WIDTH / 2
        _arrow(axes, start, end, top + 0.45, there, below=False)
        _arrow(axes, end, start, bottom, back, below=True)
    for y, word in ((top + 0.45, "forward"), (bottom, "backward")):
        axes.text(-0.3, y, word, ha="right", va="center", fontsize=9, style="italic")
    axes.set_xlim(-2, left[-1] + WIDTH + 0.2)
    axes.set_ylim(bottom - 1.1, top + 1.5)
    axes.axis("off")
    _save(figure, name)


def _cell(axes: Axes, x: float, y: float, colour: tuple[float, ...], text: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7)


def _arrow(axes: Axes, start: float, end: float, y: float, text: str, below: bool) -> None:
    axes.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": "#444444"})
    place = {"y": y - 0.12, "va": "top"} if below else {"y": y + 0.12, "va": "bottom"}
    axes.text((start + end) / 2, s=text, ha="center", fontsize=7.5, **place)


def _finish(axes: Axes, title: str, columns: int, rows: int) -> None:
    axes.set_xlim(0, columns)
    axes.set_ylim(1 - rows, 1)
    axes.set_title(title, fontsize=9)
    axes.axis("off")


def _save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name(f"{name}.png"), dpi=110)


if __name__ == "__main__":
    for file, panels in pictures().items():
        draw_groups(file, panels)
    draw_tokens("token-layouts")
    draw_batch("one-batch")
