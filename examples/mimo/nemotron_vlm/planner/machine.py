# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A machine: peaks, links, and what share of the peak each kind of work reaches."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from examples.mimo.nemotron_vlm.errors import UserError

TABLE = Path(__file__).with_name("gpus.toml")


@dataclass(frozen=True)
class Machine:
    """What time and memory are computed from.

    Attributes:
        source: where the figures are from.
        peak_flops, memory_bytes: of one rank.
        node_bandwidth, network_bandwidth: of one rank, bytes a second one way.
        link_efficiency: share of both that collectives reach.
        node_latency, network_latency: seconds of a message.
        efficiency: share of peak_flops, by kind of work.
        overhead: seconds of a layer's forward and backward beside its work, by layer; ``expert``
            for each local expert.
        microbatch_overhead, step_overhead: seconds, beside all layers.
        optimizer_bandwidth: bytes a second of the optimizer's pass over its state.
        fused: whether layers are those of GPUs, see ``activations``.
        precision: bytes of a parameter, 2 or 4.
        launches_ahead: whether a host launches work for a device that is still busy.
        shared_cores: cores that all ranks share; 0 where each rank has a device of its own.
        reserved_bytes: of a rank that no tensor may have: context, communication buffers.
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
        """Bytes a second that one rank's collectives reach within a node."""
        return self.link_efficiency * self.node_bandwidth

    @property
    def network_speed(self) -> float:
        """The same between nodes."""
        return self.link_efficiency * self.network_bandwidth

    def seconds(self, work: dict[str, float]) -> float:
        """Of operations by kind; efficiencies have the time of what goes through memory in them."""
        computed = sum(count / self.efficiency[kind] for kind, count in work.items())
        return computed / self.peak_flops

    def with_overhead(
        self, seconds: float, kind: str, layers: float = 1.0, experts: float = 0.0
    ) -> float:
        """Seconds of so many layers' work, with what the host takes for them.

        Where it launches ahead, the longer of both counts, and a part of the shorter one: a mean
        between their sum and their maximum.
        """
        host = layers * self.overhead[kind]
        if kind == "E":
            host += self.overhead["expert"] * experts
        return math.hypot(seconds, host) if self.launches_ahead else seconds + host


def find_machine(name: str) -> Machine:
    """A GPU of the table, or the file that ``calibrate`` wrote.

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
    """Write it for ``find_machine``, with the measurements that it was fitted to."""
    path.write_text(json.dumps(fitted_to | {"machine": asdict(machine)}, indent=1) + "\n")
