# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A layout as text."""

from __future__ import annotations

from collections.abc import Iterable

from examples.mimo.common.layout import layout_table, table
from layout_view.bridge import Flows
from layout_view.modules import LANGUAGE, Module
from layout_view.view import View

EVERY_RANK = 64
"""Most ranks that the rank map lists in full; of more, it has the first nodes."""
EVERY_STAGE = 16
"""Most stages that the timeline shows in full."""
WIDTH = 72
"""Width of a timeline in characters."""
MARKS = {
    "encoder forward": ">",
    "language forward": "F",
    "language backward": "B",
    "encoder backward": "<",
}
MAP_AXES = ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")


def describe(view: View) -> str:
    """Return all tables, one after another."""
    nodes = -(-view.world // view.gpus_per_node)
    title = (
        f"{_count(view.world, 'rank')}, {_count(nodes, 'node')} of {view.gpus_per_node} GPUs, "
        f"{view.layouts.placement}"
    )
    parts = (_rank_map, _groups, _bridge, _timeline)
    return "\n\n".join([title, layout_table(view.layouts), *(part(view) for part in parts)])


def _rank_map(view: View) -> str:
    shown = range(view.world if view.world <= EVERY_RANK else min(2 * view.gpus_per_node, 64))
    columns = [(module, axis) for module in view.modules for axis in _shown_axes(module)]
    topology = view.bridge.topology
    header = ["rank", "node", *(f"{module.name[:3]}.{axis}" for module, axis in columns)]
    rows = [header + ["encodes", "consumes"] * (topology is not None)]
    for rank in shown:
        at = {module.name: view.coordinates(module, rank) for module in view.modules}
        row = [rank, view.node(rank), *(at[module.name].get(axis, "-") for module, axis in columns)]
        if topology:
            first = topology.dest[rank].pp == 0
            row += [_run(topology.encodes(rank)), _run(topology.consumes(rank)) if first else "-"]
        rows.append(row)
    text = "rank map"
    if len(shown) < view.world:
        text += f" of the first {len(shown)} ranks; the step of each axis is below"
    if topology:
        text += f"; the batch in {_count(topology.atoms, 'equal run')}"
    return f"{text}\n{table(rows)}"


def _shown_axes(module: Module) -> list[str]:
    return [name for name in MAP_AXES if name in module.axes and module.axes[name].size > 1]


def _groups(view: View) -> str:
    rows = [["module", "axis", "size", "groups", "leave a node", "step", "first group"]]
    for module in view.modules:
        for axis in module.axes.values():
            if axis.name == "pp" and module.name != LANGUAGE and axis.size == 1:
                continue
            first = axis.groups[0]
            step = first[1] - first[0] if len(first) > 1 else "-"
            leaving = axis.leaving(view.gpus_per_node)
            row = [module.name, axis.name, axis.size, len(axis.groups), leaving, step]
            rows.append([*row, _ranks(first)])
    return f"groups\n{table(rows)}"


def _bridge(view: View) -> str:
    bridge, batch = view.bridge, view.layouts.batch
    sizes = sorted({len(block) for block in bridge.blocks})
    text = (
        f"bridge: {_count(len(bridge.blocks), 'block')} of "
        f"{' or '.join(map(str, sizes))} ranks, of which {view.blocks_leaving} leave a node; "
        f"rows of a step, {_count(batch.global_size, 'sample')} of {view.rows_per_sample} rows"
    )
    if view.layouts.non_colocated:
        text += "; broadcasts within a stage are not counted"
    header = ["way", "moved", "sent: most", "mean", "received: most", "mean", "leaves a node"]
    ways = {"forward": bridge.forward, "backward": bridge.backward}
    rows = [header, *([name, *_volumes(view, way)] for name, way in ways.items())]
    return f"{text}\n{table(rows)}"


def _volumes(view: View, way: Flows) -> Iterable[str]:
    yield _number(way.total)
    for rows in (way.sent(view.world), way.received(view.world)):
        yield _number(rows.max())
        yield _number(rows.mean())
    yield f"{way.leaving(view.gpus_per_node):.0%}"


def _timeline(view: View) -> str:
    line = view.timeline
    share, number = view.encoder_share, view.layouts.num_microbatches
    where = " in the bubbles" * view.in_bubbles
    text = (
        f"timeline: encoder{where} {share:.2f}, language model {1 - share:.2f} of a step without "
        f"waiting; {_count(number, 'microbatch')}: {line.total:.3f}, bubble {line.bubble:.1%}"
    )
    rows = [
        [name, "".join(_mark(spans, (place + 0.5) * line.total / WIDTH) for place in range(WIDTH))]
        for name, spans in zip(line.names, line.stages, strict=True)
    ]
    if len(rows) > EVERY_STAGE:
        half = EVERY_STAGE // 2
        rows = [*rows[:half], ["…", ""], *rows[-half:]]
    legend = "  ".join(f"{mark} {phase}" for phase, mark in MARKS.items())
    return f"{text}\n{table(rows)}\n{legend}  . waiting"


def _mark(spans, moment: float) -> str:
    for phase, begin, end in spans:
        if begin <= moment < end:
            return MARKS[phase]
    return "."


def _run(atoms: range) -> str:
    return str(atoms[0]) if len(atoms) == 1 else f"{atoms[0]}-{atoms[-1]}"


def _ranks(group: list[int]) -> str:
    shown = group if len(group) <= 8 else [*group[:4], "…", group[-1]]
    return " ".join(map(str, shown))


def _number(rows: float) -> str:
    return f"{rows:,.0f}" if rows == round(rows) else f"{rows:,.1f}"


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"
