# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A machine: its peaks, links, the groups of ranks that communicate over them, and the share of the
peak that each kind of work reaches.

The first group of an axis stands for all.

Collectives take the time of the alpha-beta model. A ring takes the latency of every hop, and each
rank sends its bytes at the bandwidth of the slowest link: NVLink within a node, or between nodes
the network adapters of all ranks of the group that share a node.
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


@dataclass(frozen=True, eq=False)  # two machines are the same if they are one object, as in caches
class Machine:
    """Figures of a machine, from which time and memory are computed; bytes and seconds."""

    source: str  # where the figures come from
    peak_flops: float  # operations per second of one rank
    memory_bytes: float  # of one rank
    node_bandwidth: float  # one rank's bytes per second, one way, within a node
    network_bandwidth: float  # and between nodes
    link_efficiency: float  # share of both bandwidths that collectives reach
    node_latency: float
    network_latency: float
    efficiency: dict[str, float]  # share of peak_flops reached, by kind of work
    # Seconds of the host for a layer's forward and backward, by kind; "expert": a local expert's.
    overhead: dict[str, float]
    microbatch_overhead: float  # of a microbatch, in addition to all layers
    step_overhead: float  # of a step
    optimizer_bandwidth: float  # bytes per second of the optimizer's pass over its state
    fused: bool = True  # whether layers are fused, see ``layers``
    precision: int = 2  # bytes of a parameter, 2 or 4
    reserved_bytes: float = 0.0  # what tensors cannot use: context, communication buffers
    gpus_per_node: int = 8  # ranks that the node's links connect

    def bandwidth(self, leaves_node: bool) -> float:
        """Return the bytes per second that one rank's collectives reach on a kind of link."""
        peak = self.network_bandwidth if leaves_node else self.node_bandwidth
        return self.link_efficiency * peak

    def latency(self, leaves_node: bool) -> float:
        """Return the seconds that a message takes on a kind of link, whatever its size."""
        return self.network_latency if leaves_node else self.node_latency

    def seconds(self, work: dict[str, float]) -> float:
        """Return the seconds of operations by kind; efficiencies account for memory traffic."""
        computed = sum(count / self.efficiency[kind] for kind, count in work.items())
        return computed / self.peak_flops

    def with_overhead(
        self, seconds: float, kind: str, layers: float = 1.0, experts: float = 0.0
    ) -> float:
        """Return the seconds of ``layers`` layers, whose work takes ``seconds``, with the host's
        overhead.

        A host launches ahead of its device, so work and overhead overlap partly: the time is their
        hypotenuse, between their maximum and their sum.
        """
        host = layers * self.overhead[kind]
        if kind == "E":
            host += self.overhead["expert"] * experts
        return math.hypot(seconds, host)

    def ring(self, group: Group, size: float) -> float:
        """Return the time of a ring all-gather or reduce-scatter of ``size`` bytes in all."""
        hops = (group.size - group.nodes) * self.node_latency
        hops += (group.nodes - 1) * self.network_latency
        return hops + self._ring_bytes(group, size)

    def all_reduce(self, group: Group, size: float = 0.0) -> float:
        """Return the time of an all-reduce of ``size`` bytes.

        Latency is that of a reduction up a tree and a broadcast down it, which libraries use for
        few bytes; transfer time is that of a ring's reduce-scatter and all-gather.
        """
        hops = math.log2(group.per_node) * self.node_latency
        hops += math.log2(group.nodes) * self.network_latency
        return 2 * (hops + self._ring_bytes(group, size))

    def all_to_all(self, group: Group, size: float) -> float:
        """Return the time of an all-to-all; each rank sends equal parts of its ``size`` bytes.

        Messages within the node follow one another, each with its latency. Those to other nodes are
        under way at the same time, with one latency in all.
        """
        inside = size * (group.per_node - 1) / group.size / self.bandwidth(leaves_node=False)
        outside = size * (group.size - group.per_node) / group.size / self.bandwidth(True)
        latency = (group.per_node - 1) * self.node_latency
        latency += self.network_latency if group.nodes > 1 else 0.0
        return latency + max(inside, outside)

    def send(self, group: Group, size: float) -> float:
        """Return the time of sending ``size`` bytes from one rank of a group to the next."""
        leaves = group.nodes > 1
        return self.latency(leaves) + size / self.bandwidth(leaves)

    def _ring_bytes(self, group: Group, size: float) -> float:
        bandwidth = self.bandwidth(leaves_node=False)
        if group.nodes > 1:
            bandwidth = min(bandwidth, self.bandwidth(leaves_node=True) * group.per_node)
        return size * (group.size - 1) / group.size / bandwidth


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
