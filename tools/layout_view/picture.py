# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The picture of a layout: rank maps, groups, the bridge and the timeline."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch, Rectangle

from layout_view.bridge import Flows
from layout_view.view import Module, View

LABELLED = 64
"""Most ranks for which a rank map names coordinates, and for which groups are drawn."""
ARROWS = 32
"""Most ranks for which the bridge is drawn and groups are numbered."""
STAGES = 32
"""Most stages for which the timeline is drawn."""
COLOURS = {
    "encoder forward": "#5b8ff9",
    "encoder backward": "#1d39c4",
    "language forward": "#5ad8a6",
    "language backward": "#237804",
}
"""Colours of the phases of the timeline."""
EMPTY, WAITING, LEAVES = "#f0f0f0", "#d9d9d9", "#cf1322"
SHOWN = ("tp", "cp", "dp", "pp", "ep")
"""Axes whose coordinates are written into a rank's cell."""


def draw(view: View, path: Path) -> None:
    """Write the picture, in the format that the file's ending says."""
    maps = [(module, "dp") for module in view.modules]
    if view.world > LABELLED and view.layouts.language.pp > 1:
        maps.append((view.modules[1], "pp"))
    columns, rows = _map_shape(view)
    cell = 0.62 if view.world <= LABELLED else min(0.3, 5 / columns)
    groups = view.split_axes
    lines = min(len(view.timeline), STAGES)
    heights = [0.6 + cell * rows, 0.7 + 0.3 * len(groups), 0.9 + 0.25 * lines]
    if view.world <= ARROWS:
        heights.insert(2, 2.2)
    figure = plt.figure(figsize=(12, sum(heights)), layout="constrained")
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    all_axes = next(parts).subplots(1, len(maps), squeeze=False)[0]
    for axes, (module, axis) in zip(all_axes, maps, strict=True):
        _rank_map(axes, view, module, axis)
    _groups(next(parts).subplots(), view, groups)
    if view.world <= ARROWS:
        all_axes = next(parts).subplots(1, 2)
        for axes, (name, way) in zip(all_axes, view.bridge.ways.items(), strict=True):
            _bridge(axes, view, name, way)
    _timeline(next(parts).subplots(), view)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _map_shape(view: View) -> tuple[int, int]:
    """Return the ranks in a row of a rank map, which are whole nodes, and the number of rows."""
    size = min(view.gpus_per_node, view.world)
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
    size = min(view.gpus_per_node, columns)
    image = np.full((rows * columns, 4), to_rgba("white"))
    image[: view.world] = to_rgba(EMPTY)
    for rank in module.ranks:
        image[rank] = _colour(module.index[axis][rank], module.sizes[axis])
    image = image.reshape(rows, columns, 4)
    axes.imshow(image, extent=(0, columns, rows, 0), aspect="auto", interpolation="nearest")
    outline = {"fill": False, "lw": 1.6 if view.world <= 1024 else 0.5, "clip_on": False}
    for first in range(0, view.world, size):
        corner = first % columns, first // columns
        axes.add_patch(Rectangle(corner, min(size, view.world - first), 1, **outline))
    for rank in range(view.world if view.world <= LABELLED else 0):
        split = [axis for axis in SHOWN if module.sizes.get(axis, 1) > 1 and rank in module.ranks]
        named = [f"{axis}{module.index[axis][rank]}" for axis in split]
        lines = [" ".join(named[i : i + 2]) for i in range(0, len(named), 2)]
        x, y = rank % columns + 0.5, rank // columns
        axes.text(x, y + 0.06, rank, ha="center", va="top", fontsize=8, weight="bold")
        axes.text(x, y + 0.94, "\n".join(lines), ha="center", va="bottom", fontsize=6)
    axes.set_title(f"{module.name} {module.layout}\ncoloured by {axis}", loc="left", fontsize=9)
    axes.set(xticks=[], yticks=[], frame_on=False)


def _groups(axes: Axes, view: View, shown: list[tuple[Module, str]]) -> None:
    """Draw a row for each axis, with one colour for the ranks of each group."""
    ranks = min(view.world, LABELLED)
    for row, (module, axis) in enumerate(shown):
        touched = [group for group in module.groups[axis] if min(group) < ranks]
        for number, group in enumerate(touched):
            edge = LEAVES if view.leaving([group]) else "white"
            for rank in (rank for rank in group if rank < ranks):
                colour = _colour(number % 10, 10)
                axes.barh(row + 0.5, 0.84, 0.76, rank + 0.08, color=colour, edgecolor=edge)
                if ranks <= ARROWS:
                    axes.text(rank + 0.5, row + 0.5, number, ha="center", va="center", fontsize=6)
    for rank in range(0, ranks + 1, view.gpus_per_node):
        axes.axvline(rank, color="black", lw=1)
    axes.set(xlim=(0, ranks), ylim=(len(shown), 0))
    numbers = range(0, ranks, 1 if ranks <= 32 else 4)
    axes.set_xticks(np.array(numbers) + 0.5, numbers, fontsize=7)
    names = [f"{module.name} {axis} ({module.sizes[axis]})" for module, axis in shown]
    axes.set_yticks(np.arange(len(shown)) + 0.5, names, fontsize=8)
    of = "" if ranks == view.world else f" of the first {ranks} ranks"
    title = f"groups{of}: one colour a group, of ten; those outlined red leave a node"
    axes.set_title(title, loc="left", fontsize=9)


def _bridge(axes: Axes, view: View, name: str, way: Flows) -> None:
    """Draw giving ranks above, taking ranks below, and an arrow for each message between them."""
    giving, taking = view.modules if name == "forward" else view.modules[::-1]
    for y, module in ((1.0, giving), (0.0, taking)):
        for rank in range(view.world):
            index = module.index["dp"].get(rank)
            colour = EMPTY if index is None else _colour(index, module.sizes["dp"])
            axes.add_patch(Rectangle((rank + 0.06, y), 0.88, 0.16, facecolor=colour))
            axes.text(rank + 0.5, y + 0.08, rank, ha="center", va="center", fontsize=6)
    most = max(way.rows, default=1.0)
    for giver, taker, rows in zip(way.givers, way.takers, way.rows, strict=True):
        arrow = {
            "arrowstyle": "-|>",
            "color": LEAVES if view.leaving([[giver, taker]]) else "#555555",
            "lw": 0.4 + 1.2 * rows / most,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        axes.annotate("", (taker + 0.5, 0.17), (giver + 0.5, 0.99), arrowprops=arrow)
    axes.set(xlim=(0, view.world), ylim=(-0.05, 1.2), xticks=[], frame_on=False)
    axes.set_yticks([1.08, 0.08], [giving.name, taking.name], fontsize=8)
    share = way.leaving(view.gpus_per_node)
    title = f"bridge, {name}: {way.total:,.0f} rows of a step, {share:.0%} leave a node (red)"
    axes.set_title(title, loc="left", fontsize=9)


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
    count = len(view.timeline)
    of = "" if len(shown) == count else f", the first {len(shown)} of {count} stages"
    title = f"timeline{of}: {view.layouts.num_microbatches} microbatches, {view.costs}; "
    title += f"takes {view.total:.3f}, bubble {view.bubble:.1%}"
    axes.set_title(title, loc="left", fontsize=9)
    drawn = {phase for spans in view.timeline.values() for phase, _, _ in spans}
    handles = [Patch(color=COLOURS[phase], label=phase) for phase in COLOURS if phase in drawn]
    handles.append(Patch(color=WAITING, label="waiting"))
    axes.figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=8)
