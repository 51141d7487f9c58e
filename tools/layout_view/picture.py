# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The picture of a layout: rank maps and the timeline."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch, Rectangle

from layout_view.view import Module, View

LABELLED = 64
"""Most ranks for which a rank map names coordinates."""
STAGES = 32
"""Most stages for which the timeline is drawn."""
COLOURS = {
    "encoder forward": "#5b8ff9",
    "encoder backward": "#1d39c4",
    "language forward": "#5ad8a6",
    "language backward": "#237804",
}
"""Colours of the phases of the timeline."""
EMPTY, WAITING = "#f0f0f0", "#d9d9d9"
SHOWN = ("tp", "cp", "dp", "pp", "ep")
"""Axes whose coordinates are written into a rank's cell."""


def draw(view: View, path: Path) -> None:
    """Write the picture, in the format that the file's ending says."""
    maps = [(module, "dp") for module in view.modules]
    if view.world > LABELLED and view.layouts.language.pp > 1:
        maps.append((view.modules[1], "pp"))
    columns, rows = _map_shape(view)
    cell = 0.62 if view.world <= LABELLED else min(0.3, 5 / columns)
    lines = min(len(view.timeline), STAGES)
    heights = [0.6 + cell * rows, 0.9 + 0.25 * lines]
    figure = plt.figure(figsize=(12, sum(heights)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    all_axes = above.subplots(1, len(maps), squeeze=False)[0]
    for axes, (module, axis) in zip(all_axes, maps, strict=True):
        _rank_map(axes, view, module, axis)
    _timeline(below.subplots(), view)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _map_shape(view: View) -> tuple[int, int]:
    """Return the ranks in a row of a rank map, which are whole nodes, and the number of rows."""
    size = min(view.machine.gpus_per_node, view.world)
    nodes = -(-view.world // size)
    across = max(1, round((nodes / size) ** 0.5))
    return across * size, -(-nodes // across)


def _colour(index: int, size: int) -> tuple[float, ...]:
    if size <= 10:
        return (*(0.45 + 0.55 * np.array(plt.cm.tab10(index)[:3])), 1.0)
    return plt.cm.turbo(0.08 + 0.84 * index / (size - 1))


def _rank_map(axes: Axes, view: View, module: Module, axis: str) -> None:
    """Draw each rank as a cell, coloured by its index along an axis; nodes are outlined."""
    columns, rows = _map_shape(view)
    size = min(view.machine.gpus_per_node, columns)
    image = np.full((rows * columns, 4), to_rgba("white"))
    image[: view.world] = to_rgba(EMPTY)
    for rank, index in module.index[axis].items():
        image[rank] = _colour(index, module.sizes[axis])
    image = image.reshape(rows, columns, 4)
    axes.imshow(image, extent=(0, columns, rows, 0), aspect="auto", interpolation="nearest")
    outline = {"fill": False, "lw": 1.6 if view.world <= 1024 else 0.5, "clip_on": False}
    for first in range(0, view.world, size):
        corner = first % columns, first // columns
        axes.add_patch(Rectangle(corner, min(size, view.world - first), 1, **outline))
    for rank in range(view.world if view.world <= LABELLED else 0):
        split = [
            axis for axis in SHOWN if rank in module.index.get(axis, ()) and module.sizes[axis] > 1
        ]
        named = [f"{axis}{module.index[axis][rank]}" for axis in split]
        lines = [" ".join(named[i : i + 2]) for i in range(0, len(named), 2)]
        x, y = rank % columns + 0.5, rank // columns
        axes.text(x, y + 0.06, rank, ha="center", va="top", fontsize=8, weight="bold")
        axes.text(x, y + 0.94, "\n".join(lines), ha="center", va="bottom", fontsize=6)
    axes.set_title(f"{module.name} {module.layout}\ncoloured by {axis}", loc="left", fontsize=9)
    axes.set(xticks=[], yticks=[], frame_on=False)


def _timeline(axes: Axes, view: View) -> None:
    """Draw a row for each stage, in which grey is waiting."""
    shown = list(view.timeline.items())[:STAGES]
    for row, (_, spans) in enumerate(shown):
        axes.broken_barh([(0, view.total)], (row + 0.1, 0.8), color=WAITING)
        for phase, colour in COLOURS.items():
            bars = [(begin, end - begin) for name, begin, end in spans if name == phase]
            axes.broken_barh(bars, (row + 0.1, 0.8), color=colour, edgecolor="white", lw=0.3)
    axes.set(xlim=(0, view.total), ylim=(len(shown), 0))
    axes.set_yticks(np.arange(len(shown)) + 0.5, [name for name, _ in shown], fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    of = "" if len(shown) == len(view.timeline) else f"; {len(shown)} stages shown"
    axes.set_title(view.describe_timeline() + of, loc="left", fontsize=9)
    drawn = {phase for spans in view.timeline.values() for phase, _, _ in spans}
    handles = [Patch(color=COLOURS[phase], label=phase) for phase in COLOURS if phase in drawn]
    handles.append(Patch(color=WAITING, label="waiting"))
    axes.figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=8)
