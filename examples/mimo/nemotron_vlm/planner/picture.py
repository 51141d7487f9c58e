# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A plan's ranks: their groups as a table, and a picture of who holds what and of a step.

Groups are read from the grids that training makes its process groups from, and the timeline is the
planner's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout, Layouts, table
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import stages_of_pipeline, timeline
from examples.mimo.nemotron_vlm.planner.step_time import step_time, work_of
from megatron.core.models.mimo.setup.module_groups import make_grid
from megatron.core.process_groups_from_grid import DENSE_FIELDS, EXPERT_FIELDS, EXPERT_VIEW

LANGUAGE, ENCODER_AXES = "language", ("tp", "dp", "pp")
AXES = ("tp", "cp", "dp", "dp_cp", "pp", "expt_tp", "ep", "expt_dp")
"""Fields of process groups; gradients are reduced over ``dp_cp`` and ``expt_dp``."""
NAMED = ("tp", "cp", "dp", "pp", "ep")
"""Axes whose coordinates are written into a rank's cell."""
LABELLED, STAGES = 64, 32
"""Most ranks whose coordinates are written, and most stages whose timeline is drawn."""
COLOURS = {
    "encoder forward": "#5b8ff9",
    "encoder backward": "#1d39c4",
    "language forward": "#5ad8a6",
    "language backward": "#237804",
}
"""Colours of the phases of the timeline."""
EMPTY, WAITING = "#f0f0f0", "#d9d9d9"


@dataclass(frozen=True)
class Module:
    """A module on its ranks, of which ``first`` is the first."""

    name: str
    layout: Layout
    first: int

    @cached_property
    def groups(self) -> dict[str, list[list[int]]]:
        """All groups of ranks along each axis that has several ranks, in the axis's order."""
        grid, found = make_grid(self.layout, "none", self.first), {}
        for axis in AXES if self.name == LANGUAGE else ENCODER_AXES:
            dims, view = DENSE_FIELDS.get(axis), None
            if dims is None:
                dims, view = EXPERT_FIELDS[axis], EXPERT_VIEW
            found[axis] = grid.get_rank_enum(dims, view=view)
        return {axis: groups for axis, groups in found.items() if len(groups[0]) > 1}

    def index(self, axis: str) -> dict[int, int]:
        """Return the coordinate of each of the module's ranks along an axis."""
        alone = [[rank] for rank in range(self.first, self.first + self.layout.size)]
        return {r: n for group in self.groups.get(axis, alone) for n, r in enumerate(group)}


def modules_of(layouts: Layouts, names: Sequence[str]) -> list[Module]:
    """Return the encoders, of these names, and the language model."""
    names = [*(names if len(names) > 1 else ["encoder"]), LANGUAGE]
    return list(map(Module, names, layouts.modules, layouts.offsets))


def leaving(groups: list[list[int]], gpus_per_node: int) -> list[list[int]]:
    """Return the groups that have ranks on several nodes."""
    return [group for group in groups if len({rank // gpus_per_node for rank in group}) > 1]


def describe(plan: Plan, machine: Machine) -> str:
    """Return a table of the groups of several ranks, and a line about the predicted step."""
    rows = [["groups of", "axis", "ranks", "number", "leave a node", "the first"]]
    for module in modules_of(plan.layouts, plan.preset.names):
        for axis, groups in module.groups.items():
            first = groups[0] if len(groups[0]) <= 8 else [*groups[0][:4], "…", groups[0][-1]]
            across = len(leaving(groups, machine.gpus_per_node))
            counts = len(groups[0]), len(groups), across
            rows.append([module.name, axis, *counts, " ".join(map(str, first))])
    return f"{table(rows)}\n{describe_step(plan, machine)}"


def describe_step(plan: Plan, machine: Machine) -> str:
    """Return the microbatches of a step, its predicted seconds, and the shares of waiting."""
    step, number = step_time(plan, machine), plan.layouts.num_microbatches
    waits = (f"{name} {step.parts[name] / step.seconds:.1%}" for name in ("bubble", "bridge"))
    return f"predicted step of {number} microbatches: {step.seconds:.3g} s, {', '.join(waits)}"


def draw(plan: Plan, machine: Machine, path: Path) -> None:
    """Write the picture, in the format that the file's ending says.

    Raises:
        UserError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layouts = plan.layouts
    modules, world = modules_of(layouts, plan.preset.names), layouts.language_offset
    world += layouts.language.size
    maps = [(module, "dp") for module in modules]
    if world > LABELLED and layouts.language.pp > 1:
        maps.append((modules[-1], "pp"))
    size = min(machine.gpus_per_node, world)
    nodes = -(-world // size)
    across = max(1, round((nodes / size) ** 0.5))
    shape = -(-nodes // across), across * size
    cell = 0.62 if world <= LABELLED else min(0.3, 5 / shape[1])
    stages = min(len(stages_of_pipeline(layouts)), STAGES)
    heights = [0.6 + cell * shape[0], 0.9 + 0.25 * stages]
    figure = plt.figure(figsize=(12, sum(heights)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    for axes, one in zip(above.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        _rank_map(axes, *one, shape, size, world)
    _timeline(below.subplots(), plan, machine)
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path}: {getattr(error, 'strerror', error)}") from error
    finally:
        plt.close(figure)


def _colour(index: int, size: int) -> tuple[float, ...]:
    from matplotlib.pyplot import cm

    if size <= 10:
        return (*(0.45 + 0.55 * np.array(cm.tab10(index)[:3])), 1.0)
    return cm.turbo(0.08 + 0.84 * index / (size - 1))


def _rank_map(axes, module: Module, axis: str, shape: tuple[int, int], size: int, world: int):
    """Draw each rank as a cell, coloured by its coordinate along an axis; nodes are outlined.

    Args:
        axes: matplotlib's. shape: rows and columns of cells. size: ranks of a node.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    rows, columns = shape
    image = np.full((rows * columns, 4), to_rgba("white"))
    image[:world] = to_rgba(EMPTY)
    coloured = module.index(axis)
    for rank, place in coloured.items():
        image[rank] = _colour(place, max(coloured.values()) + 1)
    image = image.reshape(rows, columns, 4)
    axes.imshow(image, extent=(0, columns, rows, 0), aspect="auto", interpolation="nearest")
    outline = {"fill": False, "lw": 1.6 if world <= 1024 else 0.5, "clip_on": False}
    for first in range(0, world, size):
        corner = first % columns, first // columns
        axes.add_patch(Rectangle(corner, min(size, world - first), 1, **outline))
    places = {axis: module.index(axis) for axis in NAMED if axis in module.groups}
    for rank in range(world if world <= LABELLED else 0):
        named = [f"{axis}{at[rank]}" for axis, at in places.items() if rank in at]
        lines = [" ".join(named[i : i + 2]) for i in range(0, len(named), 2)]
        x, y = rank % columns + 0.5, rank // columns
        axes.text(x, y + 0.06, rank, ha="center", va="top", fontsize=8, weight="bold")
        axes.text(x, y + 0.94, "\n".join(lines), ha="center", va="bottom", fontsize=6)
    axes.set_title(f"{module.name} {module.layout}\ncoloured by {axis}", loc="left", fontsize=9)
    axes.set(xticks=[], yticks=[], frame_on=False)


def _timeline(axes, plan: Plan, machine: Machine) -> None:
    """Draw a row for each stage, up to the end of the backward; grey is waiting."""
    from matplotlib.patches import Patch

    names = [stage.name for stage in stages_of_pipeline(plan.layouts)]
    lines = timeline(work_of(plan, machine))
    total = max(spans[-1][2] for spans in lines)
    shown = list(zip(names, lines, strict=True))[:STAGES]
    for row, (_, spans) in enumerate(shown):
        axes.broken_barh([(0, total)], (row + 0.1, 0.8), color=WAITING)
        for phase, colour in COLOURS.items():
            bars = [(begin, end - begin) for name, begin, end in spans if name == phase]
            axes.broken_barh(bars, (row + 0.1, 0.8), color=colour, edgecolor="white", lw=0.3)
    axes.set(xlim=(0, total), ylim=(len(shown), 0), xlabel="seconds")
    axes.set_yticks(np.arange(len(shown)) + 0.5, [name for name, _ in shown], fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    of = "" if len(shown) == len(lines) else f"; {len(shown)} stages shown"
    axes.set_title(describe_step(plan, machine) + of, loc="left", fontsize=9)
    drawn = {phase for _, spans in shown for phase, _, _ in spans}
    handles = [Patch(color=COLOURS[phase], label=phase) for phase in COLOURS if phase in drawn]
    handles.append(Patch(color=WAITING, label="waiting"))
    axes.figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=8)
