# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Draw which ranks form a group, and which rank holds which token, from the plans themselves.

Usage, with the checkout on PYTHONPATH: python docs/images/group_maps.py
"""

import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from examples.mimo.common.layout import Layout
from megatron.core.models.mimo.setup.module_groups import make_grid
from megatron.core.token_layout import contiguous_layout, pad_lengths, zigzag_layout

RANKS, STAGES = 16, 2
LANGUAGE = Layout(tp=2, cp=2, dp=2, pp=STAGES, ep=4, etp=1)
ENCODER = Layout(tp=2, dp=8, etp=2)

CP, LENGTHS = 4, [16, 24]
"""CP size and sample lengths in the picture of token layouts."""

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


def _cell(axes: Axes, x: float, y: float, colour: tuple[float, ...], text: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7)


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
