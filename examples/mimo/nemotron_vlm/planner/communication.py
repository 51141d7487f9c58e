# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Time of collectives by the alpha-beta model, over the links between the ranks of a group.

The first group of an axis stands for all. A ring takes the latency of every hop, and each rank
sends its bytes at the bandwidth of the slowest link: NVLink within a node, or between nodes the
network adapters of all ranks of the group that share a node.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.planner.machine import Machine


class Group(NamedTuple):
    """A group of ranks: its size, and the number of nodes it spans."""

    size: int
    nodes: int

    @property
    def per_node(self) -> float:
        """Mean number of ranks that share a node."""
        return self.size / self.nodes


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


def ring(machine: Machine, group: Group, size: float) -> float:
    """Time of a ring all-gather or reduce-scatter of ``size`` bytes in all."""
    hops = (group.size - group.nodes) * machine.node_latency
    hops += (group.nodes - 1) * machine.network_latency
    return hops + _ring_bytes(machine, group, size)


def all_reduce(machine: Machine, group: Group, size: float = 0.0) -> float:
    """Time of an all-reduce of ``size`` bytes.

    Latency is that of a reduction up a tree and a broadcast down it, which libraries use for few
    bytes; transfer time is that of a ring's reduce-scatter and all-gather.
    """
    hops = math.log2(group.per_node) * machine.node_latency
    hops += math.log2(group.nodes) * machine.network_latency
    return 2 * (hops + _ring_bytes(machine, group, size))


def all_to_all(machine: Machine, group: Group, size: float) -> float:
    """Time of an all-to-all, in which each rank sends equal parts of its ``size`` bytes to all.

    Messages within the node follow one another, each with its latency. Those to other nodes are
    under way at the same time, with one latency in all.
    """
    inside = size * (group.per_node - 1) / group.size / machine.bandwidth(leaves_node=False)
    outside = size * (group.size - group.per_node) / group.size / machine.bandwidth(True)
    latency = (group.per_node - 1) * machine.node_latency
    latency += machine.network_latency if group.nodes > 1 else 0.0
    return latency + max(inside, outside)


def send(machine: Machine, group: Group, size: float) -> float:
    """Time of sending ``size`` bytes from one rank of a group to the next."""
    leaves = group.nodes > 1
    return machine.latency(leaves) + size / machine.bandwidth(leaves)


def _ring_bytes(machine: Machine, group: Group, size: float) -> float:
    bandwidth = machine.bandwidth(leaves_node=False)
    if group.nodes > 1:
        bandwidth = min(bandwidth, machine.bandwidth(leaves_node=True) * group.per_node)
    return size * (group.size - 1) / group.size / bandwidth
