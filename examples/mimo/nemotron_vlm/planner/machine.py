# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A machine: its peaks and links, and the groups of ranks that communicate over them.

The first group of an axis stands for all. A collective takes log2(ranks) latencies, and each rank
sends its bytes at the bandwidth of the slowest link: NVLink within a node, or between nodes the
network adapters of all ranks of the group that share a node.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout, Layouts

TABLE = Path(__file__).with_name("gpus.toml")


class Group(NamedTuple):
    """A group of ranks: its size, and the number of nodes it spans."""

    size: int
    nodes: int

    @property
    def per_node(self) -> float:
        """Mean number of ranks that share a node."""
        return self.size / self.nodes


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
    members = {n: range(first, first + size * step, step) for n, (size, step) in shapes.items()}
    return {n: Group(len(m), len({r // gpus_per_node for r in m})) for n, m in members.items()}


def replicas_of(layouts: Layouts, gpus_per_node: int) -> list[Group]:
    """Return the groups over which encoders, language model and experts are replicated."""
    both = zip(layouts.encoders, layouts.offsets, strict=False)
    encoders = [groups_of(layout, gpus_per_node, first)["dp_cp"] for layout, first in both]
    language = groups_of(layouts.language, gpus_per_node, layouts.language_offset)
    return [*encoders, language["dp_cp"], language["expt_dp"]]


@dataclass(frozen=True, eq=False)  # two machines are the same if they are one object, as in caches
class Machine:
    """Figures of a machine, from which time and memory are computed; bytes and seconds."""

    source: str  # where the figures come from
    peak_flops: float  # operations per second of one rank
    memory_bytes: float  # of one rank
    node_bandwidth: float  # bytes per second that collectives of a rank reach, in a node
    network_bandwidth: float  # and between nodes
    node_latency: float
    network_latency: float
    efficiency: dict[str, float]  # share of peak_flops reached, by kind of work
    # Seconds of the host for a layer's forward and backward, by kind; "expert": a local expert's.
    overhead: dict[str, float]
    microbatch_overhead: float  # of a microbatch, in addition to all layers
    step_overhead: float  # of a step
    optimizer_bandwidth: float  # bytes per second of the optimizer's pass over its state
    precision: int = 2  # bytes of a parameter, 2 or 4
    reserved_bytes: float = 0.0  # what tensors cannot use: context, communication buffers
    gpus_per_node: int = 8  # ranks that the node's links connect
    has_graphs: bool = False  # whether CUDA graphs launch whole recurrent layers and experts

    def latency(self, group: Group) -> float:
        """Return the seconds in which a message of no size reaches all ranks of a group."""
        inside = math.log2(group.per_node) * self.node_latency
        return inside + math.log2(group.nodes) * self.network_latency

    def gather(self, group: Group, size: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter of ``size`` bytes in all."""
        bandwidth = self.node_bandwidth
        if group.nodes > 1:
            bandwidth = min(bandwidth, self.network_bandwidth * group.per_node)
        return self.latency(group) + size * (group.size - 1) / group.size / bandwidth

    def all_to_all(self, group: Group, size: float) -> float:
        """Return the seconds in which each rank sends equal parts of its ``size`` bytes."""
        inside = size * (group.per_node - 1) / group.size / self.node_bandwidth
        outside = size * (group.size - group.per_node) / group.size / self.network_bandwidth
        return self.latency(group) + max(inside, outside)

    def seconds(self, work: dict) -> float:
        """Return the seconds of operations by kind, which may be arrays; efficiencies account for
        memory traffic."""
        return sum(count / self.efficiency[kind] for kind, count in work.items()) / self.peak_flops

    def with_host(
        self, seconds: float, kind: str, layers: float = 1.0, experts: float = 0
    ) -> float:
        """Return the seconds of layers, whose work takes ``seconds``, with the host's launches.

        A host launches ahead of its device, so the two overlap partly: the time is their
        hypotenuse, between their maximum and their sum.
        """
        launches = layers * self.overhead[kind] + experts * self.overhead["expert"]
        return math.hypot(seconds, launches)


def find_machine(name: str) -> Machine:
    """Return a machine by the name of a GPU in the table.

    Raises:
        UserError: the table lacks it.
    """
    table = tomllib.loads(TABLE.read_text())
    defaults = table.pop("defaults")
    if name not in table:
        raise UserError(f"--plan-gpu {name}: no such GPU; choose from {', '.join(table)}")
    return Machine(**defaults | table[name])
