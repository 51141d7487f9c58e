# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The picture of a layout: rank maps, groups, the bridge and the timeline."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from PIL import Image

from bench.timeline import COLOURS
from layout_view.bridge import Flows
from layout_view.modules import Axis, Module, leaves_node
from layout_view.view import View

LABELLED = 64
"""Most ranks for which a rank map names coordinates, and for which groups are drawn."""
ARROWS = 32
"""Most ranks for which the bridge is drawn and groups are numbered."""
STAGES = 32
"""Most stages for which the timeline is drawn."""
EMPTY, WAITING, LEAVES = "#f0f0f0", "#d9d9d9", "#cf1322"
COLOUR_TABLE = 128
"""Number of colours of a PNG."""
SHOWN = ("tp", "cp", "dp", "pp", "ep")
"""Axes whose coordinates are written into a rank's cell."""


def draw(view: View, path: Path, kind: str) -> None:
    """Write the picture.

    Args:
        kind: ``png`` or ``svg``.
    """
    maps = [(module, "dp") for module in view.modules]
    if view.world > LABELLED and view.layouts.language.pp > 1:
        maps.append((view.modules[1], "pp"))
    columns, rows = _map_shape(view)
    cell = 0.62 if view.world <= LABELLED else min(0.3, 5 / columns)
    groups = _shown_groups(view)
    lines = min(len(view.timeline.stages), STAGES)
    heights = [0.6 + cell * rows, 0.7 + 0.3 * len(groups), 0.9 + 0.25 * lines]
    if view.world <= ARROWS:
        heights.insert(2, 2.2)
    figure = plt.figure(figsize=(12, sum(heights)), layout="constrained")
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    for axes, (module, axis) in zip(
        next(parts).subplots(1, len(maps), squeeze=False)[0], maps, strict=True
    ):
        _rank_map(axes, view, module, axis)
    _groups(next(parts).subplots(), view, groups)
    if view.world <= ARROWS:
        ways = {"forward": view.bridge.forward, "backward": view.bridge.backward}
        for axes, (name, way) in zip(next(parts).subplots(1, 2), ways.items(), strict=True):
            _bridge(axes, view, name, way)
    _timeline(next(parts).subplots(), view)
    if kind == "png":
        with BytesIO() as full:
            figure.savefig(full, dpi=100, format=kind)
            image = Image.open(full).convert("RGB").quantize(COLOUR_TABLE)  # a quarter of the bytes
            image.save(path, format=kind, optimize=True)
    else:
        figure.savefig(path, format=kind)
    plt.close(figure)


def _map_shape(view: View) -> tuple[int, int]:
    """Return the ranks in a row of a rank map, which are whole nodes, and the number of rows."""
    size = min(view.gpus_per_node, view.world)
    nodes = -(-view.world // size)
    across = max(1, round((nodes / size) ** 0.5))
    return across * size, -(-nodes // across)


def _rank_map(axes: Axes, view: View, module: Module, axis: str) -> None:
    """Draw each rank as a cell, coloured by its index along an axis; nodes are outlined."""
    columns, rows = _map_shape(view)
    size = min(view.gpus_per_node, columns)
    index = module.axes[axis].index
    image = np.full((rows * columns, 4), matplotlib.colors.to_rgba("white"))
    image[: view.world] = matplotlib.colors.to_rgba(EMPTY)
    for rank in module.ranks:
        image[rank] = _colour(index[rank], module.axes[axis].size)
    image = image.reshape(rows, columns, 4)
    axes.imshow(image, extent=(0, columns, rows, 0), aspect="auto", interpolation="nearest")
    nodes = [
        Rectangle(
            (first % columns, first // columns), min(size, view.world - first), 1, clip_on=False
        )
        for first in range(0, view.world, size)
    ]
    width = 1.6 if view.world <= 1024 else 0.5
    axes.add_collection(PatchCollection(nodes, facecolor="none", edgecolor="black", lw=width))
    if view.world <= LABELLED:
        for rank in range(view.world):
            at = view.coordinates(module, rank)
            named = [f"{name}{at[name]}" for name in SHOWN if _splits(module, name) and at]
            lines = [" ".join(named[i : i + 2]) for i in range(0, len(named), 2)]
            x, y = rank % columns + 0.5, rank // columns
            axes.text(x, y + 0.06, rank, ha="center", va="top", fontsize=8, weight="bold")
            axes.text(x, y + 0.94, "\n".join(lines), ha="center", va="bottom", fontsize=6)
    axes.set_title(f"{module.name} {module.layout}\ncoloured by {axis}", loc="left", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


def _splits(module: Module, axis: str) -> bool:
    return axis in module.axes and module.axes[axis].size > 1


def _colour(index: int, size: int) -> tuple[float, ...]:
    if size <= 10:
        return (*(0.45 + 0.55 * np.array(plt.cm.tab10(index)[:3])), 1.0)
    return plt.cm.turbo(0.08 + 0.84 * index / (size - 1))


def _shown_groups(view: View) -> list[tuple[Module, Axis]]:
    return [
        (module, axis) for module in view.modules for axis in module.axes.values() if axis.size > 1
    ]


def _groups(axes: Axes, view: View, groups: list[tuple[Module, Axis]]) -> None:
    """Draw a row for each axis, with boxes of one colour for the ranks of each group."""
    ranks = min(view.world, LABELLED)
    for row, (_, axis) in enumerate(groups):
        touched = [group for group in axis.groups if min(group) < ranks]
        for number, group in enumerate(touched):
            edge = LEAVES if leaves_node(group, view.gpus_per_node) else "white"
            for run in _runs([rank for rank in group if rank < ranks]):
                box = FancyBboxPatch(
                    (run.start + 0.08, row + 0.12),
                    len(run) - 0.16,
                    0.76,
                    boxstyle="round,pad=0,rounding_size=0.1",
                    facecolor=_colour(number % 10, 10),
                    edgecolor=edge,
                    lw=1.4,
                )
                box.set_in_layout(False)
                axes.add_patch(box)
                for rank in run if ranks <= ARROWS else ():
                    place = (rank + 0.5, row + 0.52)
                    axes.text(*place, number, ha="center", va="center", fontsize=6)
    for rank in range(0, ranks + 1, view.gpus_per_node):
        axes.axvline(rank, color="black", lw=1)
    axes.set_xlim(0, ranks)
    axes.set_ylim(len(groups), 0)
    step = 1 if ranks <= 32 else 4
    axes.set_xticks(np.arange(0, ranks, step) + 0.5, range(0, ranks, step), fontsize=7)
    names = [f"{module.name} {axis.name} ({axis.size})" for module, axis in groups]
    axes.set_yticks(np.arange(len(groups)) + 0.5, names, fontsize=8)
    of = "" if ranks == view.world else f" of the first {ranks} ranks"
    title = f"groups{of}: one colour a group, of ten; those outlined red leave a node"
    axes.set_title(title, loc="left", fontsize=9)


def _runs(ranks: list[int]) -> list[range]:
    """Join adjacent ranks to runs."""
    runs: list[range] = []
    for rank in sorted(ranks):
        if runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs


def _bridge(axes: Axes, view: View, name: str, way: Flows) -> None:
    """Draw giving ranks above, taking ranks below, and an arrow for each message between them."""
    encoder, language = view.modules
    giving, taking = (encoder, language) if name == "forward" else (language, encoder)
    for y, module in ((1.0, giving), (0.0, taking)):
        for rank in range(view.world):
            held = rank in module.ranks
            index = module.axes["dp"].index.get(rank, 0)
            colour = _colour(index, module.axes["dp"].size) if held else EMPTY
            axes.add_patch(Rectangle((rank + 0.06, y), 0.88, 0.16, facecolor=colour))
            axes.text(rank + 0.5, y + 0.08, rank, ha="center", va="center", fontsize=6)
    most = way.rows.max() if len(way.rows) else 1.0
    for giver, taker, rows in zip(way.givers, way.takers, way.rows, strict=True):
        leaves = view.node(giver) != view.node(taker)
        arrow = {
            "arrowstyle": "-|>",
            "color": LEAVES if leaves else "#555555",
            "lw": 0.4 + 1.2 * rows / most,
            "mutation_scale": 7,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        axes.annotate("", (taker + 0.5, 0.17), (giver + 0.5, 0.99), arrowprops=arrow)
    axes.set_xlim(0, view.world)
    axes.set_ylim(-0.05, 1.2)
    axes.set_yticks([1.08, 0.08], [giving.name, taking.name], fontsize=8)
    axes.set_xticks([])
    axes.set_frame_on(False)
    share = way.leaving(view.gpus_per_node)
    title = f"bridge, {name}: {way.total:,.0f} rows of a step, {share:.0%} leave a node (red)"
    axes.set_title(title, loc="left", fontsize=9)


def _timeline(axes: Axes, view: View) -> None:
    """Draw a row for each stage, in which grey is waiting."""
    line = view.timeline
    for row, spans in enumerate(line.stages[:STAGES]):
        axes.broken_barh([(0, line.total)], (row + 0.1, 0.8), color=WAITING)
        for phase, colour in COLOURS.items():
            bars = [(begin, end - begin) for name, begin, end in spans if name == phase]
            axes.broken_barh(bars, (row + 0.1, 0.8), color=colour, edgecolor="white", lw=0.3)
    rows = min(len(line.stages), STAGES)
    axes.set_ylim(rows, 0)
    axes.set_xlim(0, line.total)
    axes.set_yticks(np.arange(rows) + 0.5, line.names[:rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("1 is a step in which no rank waits", fontsize=8)
    of = "" if rows == len(line.stages) else f", the first {rows} of {len(line.stages)} stages"
    encoder = "encoder in the bubbles" if view.in_bubbles else "encoder"
    title = (
        f"timeline{of}: {view.layouts.num_microbatches} microbatches, {encoder} "
        f"{view.encoder_share:.2f} of the work; takes {line.total:.3f}, bubble {line.bubble:.1%}"
    )
    axes.set_title(title, loc="left", fontsize=9)
    drawn = {phase for spans in line.stages for phase, _, _ in spans}
    handles = [Patch(color=COLOURS[phase], label=phase) for phase in COLOURS if phase in drawn]
    handles.append(Patch(color=WAITING, label="waiting"))
    axes.figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=8)
