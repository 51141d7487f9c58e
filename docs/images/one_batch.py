# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Draw one-batch.png: what each rank holds of a batch on its way, from the plans themselves.

Usage, with the checkout on PYTHONPATH: python docs/images/one_batch.py
"""

import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.token_layout import pad_lengths, zigzag_layout

RANKS, CP, PP, TOKENS = 4, 2, 2, 4
"""Four ranks: encoder dp=4, language model cp=2, pp=2. A sample is drawn as four runs of tokens."""

COLOURS = ("#5b8ff9", "#f6bd16", "#5ad8a6", "#e8684a")
"""Colours of the samples; there is one sample for each rank that encodes."""
NOTHING = "#ffffff"

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


def cells(rank: int) -> list[list[tuple[int, bool]]]:
    """Return the rank's cells by column: a sample's colour, and whether the rank has this run."""
    source = HyperCommGrid([1, RANKS], ["tp", "dp"])
    destination = HyperCommGrid([1, CP, 1, PP], ["tp", "cp", "dp", "pp"])
    topology = bridge_topology(source, destination)
    at = topology.dest[rank]
    encoded = set(topology.encodes(rank))
    consumed = set(topology.consumes(rank)) if at.pp == 0 else set()
    own = set(zigzag_layout(pad_lengths([TOKENS], CP), CP).tokens[at.cp].tolist())
    everywhere = [(sample, token) for sample in range(RANKS) for token in range(TOKENS)]
    last = at.pp == PP - 1
    return [
        [(sample, sample in encoded) for sample, _ in everywhere],
        [(sample, sample in consumed) for sample, _ in everywhere],
        [(sample, token in own) for sample, token in everywhere],
        [(sample, token in own and last) for sample, token in everywhere],
    ]


def arrow(axes, start: float, end: float, y: float, text: str, below: bool) -> None:
    """Draw an arrow between two columns, with its text above or below."""
    axes.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": "#444444"})
    place = {"y": y - 0.12, "va": "top"} if below else {"y": y + 0.12, "va": "bottom"}
    axes.text((start + end) / 2, s=text, ha="center", fontsize=7.5, **place)


def main() -> None:
    """Write the picture beside this file."""
    os.environ.setdefault("WORLD_SIZE", str(RANKS))
    figure, axes = plt.subplots(figsize=(11, 4.4))
    left = [column * (WIDTH + GAP) for column in range(len(COLUMNS))]
    for rank in range(RANKS):
        y = (RANKS - 1 - rank) * (HEIGHT + 0.25)
        axes.text(-0.3, y + HEIGHT / 2, f"rank {rank}", ha="right", va="center", fontsize=9)
        for x, held in zip(left, cells(rank), strict=True):
            size = WIDTH / len(held)
            for number, (sample, has) in enumerate(held):
                colour = COLOURS[sample] if has else NOTHING
                corner = (x + number * size, y)
                axes.add_patch(Rectangle(corner, size, HEIGHT, facecolor=colour, linewidth=0))
            axes.add_patch(Rectangle((x, y), WIDTH, HEIGHT, fill=False, edgecolor="#888888"))
    top, bottom = RANKS * (HEIGHT + 0.25), -0.35
    for x, title in zip(left, COLUMNS, strict=True):
        axes.text(x + WIDTH / 2, top - 0.15, title, ha="center", fontsize=10, weight="bold")
    for x, there, back in zip(left[1:], FORWARD, BACKWARD, strict=True):
        arrow(axes, x - GAP - WIDTH / 2, x + WIDTH / 2, top + 0.45, there, below=False)
        arrow(axes, x + WIDTH / 2, x - GAP - WIDTH / 2, bottom, back, below=True)
    axes.text(-0.3, top + 0.45, "forward", ha="right", va="center", fontsize=9, style="italic")
    axes.text(-0.3, bottom, "backward", ha="right", va="center", fontsize=9, style="italic")
    axes.set_xlim(-2, left[-1] + WIDTH + 0.2)
    axes.set_ylim(bottom - 1.1, top + 1.5)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("one-batch.png"), dpi=110)


if __name__ == "__main__":
    main()
