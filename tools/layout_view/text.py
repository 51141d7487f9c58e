# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A layout as text."""

from __future__ import annotations

from examples.mimo.common.layout import layout_table, table
from layout_view.view import LANGUAGE, View

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
    columns = [(module, axis) for module, axis in view.split_axes if axis != "dp_cp"]
    topology = view.bridge.topology
    header = ["rank", "node", *(f"{module.name[:3]}.{axis}" for module, axis in columns)]
    rows = [header + ["encodes", "consumes"] * (topology is not None)]
    for rank in shown:
        row = [rank, rank // view.gpus_per_node]
        row += [module.index[axis].get(rank, "-") for module, axis in columns]
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


def _groups(view: View) -> str:
    rows = [["module", "axis", "size", "groups", "leave a node", "step", "first group"]]
    for module in view.modules:
        for axis, groups in module.groups.items():
            if axis == "pp" and module.name != LANGUAGE and module.sizes[axis] == 1:
                continue
            first = groups[0]
            step = first[1] - first[0] if len(first) > 1 else "-"
            counts = [len(first), len(groups), len(view.leaving(groups)), step]
            shown = first if len(first) <= 8 else [*first[:4], "…", first[-1]]
            rows.append([module.name, axis, *counts, " ".join(map(str, shown))])
    return f"groups\n{table(rows)}"


def _bridge(view: View) -> str:
    bridge, batch = view.bridge, view.layouts.batch
    sizes = sorted({len(block) for block in bridge.blocks})
    leaving = len(view.leaving(bridge.blocks))
    text = (
        f"bridge: {_count(len(bridge.blocks), 'block')} of "
        f"{' or '.join(map(str, sizes))} ranks, of which {leaving} leave a node; "
        f"rows of a step, {_count(batch.global_size, 'sample')} of {view.rows_per_sample} rows"
    )
    if view.layouts.non_colocated:
        text += "; broadcasts within a stage are not counted"
    header = ["way", "moved", "sent: most", "mean", "received: most", "mean", "leaves a node"]
    rows = [header]
    for name, way in bridge.ways.items():
        ranks = [way.sent(view.world), way.received(view.world)]
        volumes = [figure for each in ranks for figure in (each.max(), each.mean())]
        share = f"{way.leaving(view.gpus_per_node):.0%}"
        rows.append([name, *map(_number, (way.total, *volumes)), share])
    return f"{text}\n{table(rows)}"


def _timeline(view: View) -> str:
    number, total = view.layouts.num_microbatches, view.total
    text = (
        f"timeline: {view.costs}; {_count(number, 'microbatch')}: {total:.3f}, "
        f"bubble {view.bubble:.1%}"
    )
    rows = [
        [name, "".join(_mark(spans, (place + 0.5) * total / WIDTH) for place in range(WIDTH))]
        for name, spans in view.timeline.items()
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


def _number(rows: float) -> str:
    return f"{rows:,.0f}" if rows == round(rows) else f"{rows:,.1f}"


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"
