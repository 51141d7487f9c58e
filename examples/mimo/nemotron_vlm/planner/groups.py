# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that communicate, by axis; the first group of an axis stands for all."""

from __future__ import annotations

from functools import cache

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.planner.machine import Group


@cache
def group_of(size: int, step: int, first: int, gpus_per_node: int) -> Group:
    """Return the group of ``size`` ranks from ``first`` on, ``step`` apart."""
    ranks = range(first, first + size * step, step)
    return Group(size, len({rank // gpus_per_node for rank in ranks}))


@cache
def groups_of(lay: Layout, gpus_per_node: int, first: int = 0) -> dict[str, Group]:
    """Return the groups of a module's first rank by axis; ranks are ordered tp, cp, dp, pp.

    Experts factor the ranks of a stage in the order expt_tp, ep, expt_dp.
    """
    shapes = {
        "tp": (lay.tp, 1),
        "cp": (lay.cp, lay.tp),
        "dp_cp": (lay.dp * lay.cp, lay.tp),
        "pp": (lay.pp, lay.tp * lay.cp * lay.dp),
        "expt_tp": (lay.etp, 1),
        "ep": (lay.ep, lay.etp),
        "expt_dp": (lay.expt_dp, lay.etp * lay.ep),
    }
    return {axis: group_of(*shape, first, gpus_per_node) for axis, shape in shapes.items()}


def replicas_of(layouts: Layouts, gpus_per_node: int) -> list[Group]:
    """Return the groups over which encoders, language model and experts are replicated."""
    both = zip(layouts.encoders, layouts.offsets, strict=False)
    encoders = [groups_of(layout, gpus_per_node, first)["dp_cp"] for layout, first in both]
    language = groups_of(layouts.language, gpus_per_node, layouts.language_offset)
    return [*encoders, language["dp_cp"], language["expt_dp"]]
