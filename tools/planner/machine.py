# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A machine: peaks, links, and what share of the peak each kind of work reaches."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from examples.mimo.nemotron_vlm.errors import UserError

TABLE = Path(__file__).with_name("gpus.toml")
PASSES = 5
"""Times that a kept tensor goes through memory: written, read again, its gradient written and read
twice."""


@dataclass(frozen=True)
class Machine:
    """What time and memory are computed from.

    Attributes:
        source: where the figures are from.
        peak_flops, memory_bytes, memory_bandwidth: of one rank. memory_bandwidth 0: its time is in
            the efficiencies, as measured.
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
        shared_cores: cores that all ranks share; 0 where each rank has a device of its own.
        reserved_bytes: of a rank that no tensor may have: context, communication buffers.
    """

    source: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
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

    def seconds(self, work: dict[str, float], kept: float = 0.0) -> float:
        """Of operations by kind, and of the bytes that go through memory for what is kept."""
        moved = PASSES * kept / self.memory_bandwidth if self.memory_bandwidth else 0.0
        computed = sum(count / self.efficiency[kind] for kind, count in work.items())
        return computed / self.peak_flops + moved


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
