# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A machine: its peaks, links, and the share of the peak that each kind of work reaches."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from examples.mimo.common.errors import UserError

TABLE = Path(__file__).with_name("gpus.toml")


@dataclass(frozen=True)
class Machine:
    """Figures of a machine, from which time and memory are computed.

    Attributes:
        source: origin of the figures.
        peak_flops, memory_bytes: operations a second and memory of one rank.
        node_bandwidth, network_bandwidth: one rank's bytes per second, one way, within and between
            nodes.
        link_efficiency: share of both bandwidths that collectives reach.
        node_latency, network_latency: latency of a message in seconds.
        efficiency: share of peak_flops reached, by kind of work.
        overhead: seconds of the host for a layer's forward and backward, by kind of layer;
            ``expert`` is for each local expert.
        microbatch_overhead, step_overhead: seconds of a microbatch and of a step in addition to all
            layers.
        optimizer_bandwidth: bytes per second of the optimizer's pass over its state.
        fused: whether layers are fused, see ``activations``.
        precision: bytes of a parameter, 2 or 4.
        launches_ahead: whether the host launches work while the device is still busy.
        shared_cores: cores that all ranks share; 0 where each rank has a device of its own.
        reserved_bytes: a rank's memory that tensors cannot use: context, communication buffers.
    """

    source: str
    peak_flops: float
    memory_bytes: float
    node_bandwidth: float
    network_bandwidth: float
    link_efficiency: float
    node_latency: float
    network_latency: float
    efficiency: dict[str, float]
    overhead: dict[str, float]
    microbatch_overhead: float
    step_overhead: float
    optimizer_bandwidth: float
    fused: bool = True
    precision: int = 2
    launches_ahead: bool = True
    shared_cores: int = 0
    reserved_bytes: float = 0.0

    @property
    def node_speed(self) -> float:
        """Bytes per second that one rank's collectives reach within a node."""
        return self.link_efficiency * self.node_bandwidth

    @property
    def network_speed(self) -> float:
        """Bytes per second that one rank's collectives reach between nodes."""
        return self.link_efficiency * self.network_bandwidth

    def seconds(self, work: dict[str, float]) -> float:
        """Return the seconds of operations by kind; efficiencies account for memory traffic."""
        computed = sum(count / self.efficiency[kind] for kind, count in work.items())
        return computed / self.peak_flops

    def with_overhead(
        self, seconds: float, kind: str, layers: float = 1.0, experts: float = 0.0
    ) -> float:
        """Return the seconds of ``layers`` layers, whose work takes ``seconds``, with the host's
        overhead.

        If the host launches ahead, work and overhead overlap partly: the time is their hypotenuse,
        between their maximum and their sum. Otherwise it is their sum.
        """
        host = layers * self.overhead[kind]
        if kind == "E":
            host += self.overhead["expert"] * experts
        return math.hypot(seconds, host) if self.launches_ahead else seconds + host


def find_machine(name: str) -> Machine:
    """Return a machine by the name of a GPU in the table, or from a file that ``calibrate`` wrote.

    Raises:
        UserError: there is neither.
    """
    table = tomllib.loads(TABLE.read_text())
    defaults = table.pop("defaults")
    if name in table:
        return Machine(**defaults | table[name])
    try:
        return Machine(**json.loads(Path(name).read_text())["machine"])
    except OSError as error:
        known = ", ".join(table)
        raise UserError(f"--gpu {name}: no such GPU and no file; choose from {known}") from error
    except (ValueError, TypeError, KeyError) as error:
        wanted = ", ".join(field.name for field in fields(Machine))
        raise UserError(f"--gpu {name}: not a file of calibrate, with {wanted}") from error


def write_machine(machine: Machine, path: Path, fitted_to: dict) -> None:
    """Write a machine for ``find_machine``, with the measurements that it was fitted to."""
    path.write_text(json.dumps(fitted_to | {"machine": asdict(machine)}, indent=1) + "\n")
