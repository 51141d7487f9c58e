# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A machine: its peaks and links, and the groups of ranks that communicate over them.

The first group of an axis stands for all. In a collective, each rank sends its bytes at the
bandwidth of the slowest link: NVLink within a node, or between nodes the network adapters of all
ranks of the group that share a node.
"""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout

TABLE = Path(__file__).with_name("gpus.toml")

EFFICIENCY = {"gemm": 0.8, "attention": 0.49, "scan": 0.067, "experts": 0.56, "vit": 0.5}
EFFICIENCY |= {"delta": 0.1}  # a guess
"""Shares of the peak, by kind of work. They, and the seconds beside the work, were fitted to
thirteen models on one H200."""

OVERHEAD = {"*": 3.3e-3, "M": 9.1e-3, "E": 10.9e-3, "expert": 2.6e-4, "vit": 3.1e-3, "head": 3.8e-3}
OVERHEAD |= {"G": 4e-3, "-": 1e-3}  # guesses
"""Seconds of the host for a layer's forward and backward, by kind; "expert": a local expert's."""


class Group(NamedTuple):
    """A group of ranks: its size, and the mean number of its ranks that share a node."""

    size: int
    per_node: float


@cache
def groups_of(lay: Layout, gpus_per_node: int, first: int = 0) -> dict[str, Group]:
    """Return the groups of a module's first rank by axis; ranks are ordered tp, cp, dp, pp.

    Experts factor the ranks of a stage in the order expt_tp, ep, expt_dp.
    """
    shapes = {
        "tp": (lay.tp, 1),
        "dp_cp": (lay.dp * lay.cp, lay.tp),
        "expt_tp": (lay.etp, 1),
        "ep": (lay.ep, lay.etp),
        "expt_dp": (lay.expt_dp, lay.etp * lay.ep),
    }
    members = {n: range(first, first + size * step, step) for n, (size, step) in shapes.items()}
    nodes = {n: len({rank // gpus_per_node for rank in m}) for n, m in members.items()}
    return {n: Group(len(m), len(m) / nodes[n]) for n, m in members.items()}


@dataclass(frozen=True, eq=False)  # two machines are the same if they are one object, as in caches
class Machine:
    """Figures of a machine, from which time and memory are computed; bytes and seconds."""

    source: str  # where the figures come from
    peak_flops: float  # operations per second of one rank
    memory_bytes: float  # of one rank
    node_bandwidth: float  # bytes per second that collectives of a rank reach, in a node
    network_bandwidth: float  # and between nodes
    overhead: dict[str, float] = field(default_factory=OVERHEAD.copy)
    microbatch_overhead: float = 0.009  # of a microbatch, in addition to all layers
    step_overhead: float = 0.0295  # of a step
    memory_bandwidth: float = 2.95e12  # bytes per second that the optimizer reads and writes
    host_bandwidth: float = 64e9  # of copies from its host, or to it: PCIe 5.0, 16 lanes
    precision: int = 2  # bytes of a parameter, 2 or 4
    reserved_bytes: float = 10e9  # what tensors cannot use: context, communication buffers
    gpus_per_node: int = 8  # ranks that the node's links connect

    def gather(self, group: Group, size: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter of ``size`` bytes in all."""
        bandwidth = self.node_bandwidth
        if group.per_node < group.size:
            bandwidth = min(bandwidth, self.network_bandwidth * group.per_node)
        return size * (group.size - 1) / group.size / bandwidth

    def all_to_all(self, group: Group, size: float) -> float:
        """Return the seconds in which each rank sends equal parts of its ``size`` bytes."""
        inside = size * (group.per_node - 1) / group.size / self.node_bandwidth
        outside = size * (group.size - group.per_node) / group.size / self.network_bandwidth
        return max(inside, outside)

    def seconds(self, work: dict) -> float:
        """Return the seconds of operations by kind, which may be arrays; efficiencies account for
        memory traffic."""
        return sum(count / EFFICIENCY[kind] for kind, count in work.items()) / self.peak_flops


def find_machine(name: str, **others: object) -> Machine:
    """Return a machine by the name of a GPU in the table, with other figures of it.

    Raises:
        UserError: the table lacks it.
    """
    table = tomllib.loads(TABLE.read_text())
    if name not in table:
        raise UserError(f"--plan-gpu {name}: no such GPU; choose from {', '.join(table)}")
    return Machine(**table[name] | others)
