# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A layout as text."""

from examples.mimo.common.layout import layout_table, table
from layout_view.bridge import leaving
from layout_view.view import LANGUAGE, View

EVERY_RANK = 64
"""Most ranks that the rank map lists in full; of more, it has the first nodes."""


def describe(view: View) -> str:
    """Return all tables, one after another."""
    per_node = view.machine.gpus_per_node
    title = f"{_count(view.world, 'rank')}, {_count(-(-view.world // per_node), 'node')} of "
    title += f"{per_node} GPUs, {view.layouts.placement}"
    parts = [title, layout_table(view.layouts), _rank_map(view), _groups(view), _bridge(view)]
    return "\n\n".join([*parts, view.describe_timeline()])


def _rank_map(view: View) -> str:
    shown = range(
        view.world if view.world <= EVERY_RANK else min(2 * view.machine.gpus_per_node, 64)
    )
    columns = [(module, axis) for module, axis in view.split_axes if axis != "dp_cp"]
    topology = view.bridge.topology
    header = ["rank", "node", *(f"{module.name[:3]}.{axis}" for module, axis in columns)]
    rows = [header + ["encodes", "consumes"] * (topology is not None)]
    for rank in shown:
        row = [rank, rank // view.machine.gpus_per_node]
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
    text = (
        f"bridge: {_count(len(bridge.blocks), 'block')} of {' or '.join(map(str, sizes))} ranks, "
        f"of which {len(view.leaving(bridge.blocks))} leave a node; rows of a step, "
        f"{_count(batch.global_size, 'sample')} of {view.rows_per_sample:g} rows"
    )
    if view.layouts.non_colocated:
        text += "; broadcasts within a stage are not counted"
    rows = [["way", "moved", "sent: most", "mean", "received: most", "mean", "leaves a node"]]
    for name, way in (("forward", bridge.forward), ("backward", bridge.backward)):
        ranks = way.sum(axis=1), way.sum(axis=0)
        volumes = [figure for each in ranks for figure in (each.max(), each.mean())]
        share = f"{leaving(way, view.machine.gpus_per_node):.0%}"
        rows.append([name, *map(_number, (way.sum(), *volumes)), share])
    return f"{text}\n{table(rows)}"


def _run(atoms: range) -> str:
    return str(atoms[0]) if len(atoms) == 1 else f"{atoms[0]}-{atoms[-1]}"


def _number(rows: float) -> str:
    return f"{rows:,.0f}" if rows == round(rows) else f"{rows:,.1f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
