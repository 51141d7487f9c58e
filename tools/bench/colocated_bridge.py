# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Print the bytes that the colocated bridge moves, against the minimum and a plain bridge.

Usage, with the checkout on PYTHONPATH: python tools/bench/colocated_bridge.py
Under torchrun with a multiple of 4 ranks, it also prints the bridge's time.
"""

import math
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from ranks import seconds, start

from megatron.core.context_parallel_layout import pad_lengths, zigzag_layout
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.bridge import Bridge
from megatron.core.models.mimo.bridge.plan import AtomRows, plan_block
from megatron.core.models.mimo.bridge.topology import BridgeTopology, bridge_topology

SAMPLE_ROWS = 256
SAMPLES = 8
"""Samples of a DP rank on the side with fewer DP ranks."""
HIDDEN = 2688


@dataclass(frozen=True)
class Layout:
    """Layouts of a bridge: TP of the source; TP, CP and PP of the destination; DP is the rest."""

    src_tp: int
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def grids(self, world: int) -> tuple[HyperCommGrid, HyperCommGrid]:
        """Return the grids of source and destination over ``world`` ranks."""
        shape = [self.tp, self.cp, world // (self.tp * self.cp * self.pp), self.pp]
        return (
            HyperCommGrid([self.src_tp, world // self.src_tp], ["tp", "dp"]),
            HyperCommGrid(shape, ["tp", "cp", "dp", "pp"]),
        )


LAYOUTS = {
    "fan-in 2": Layout(1, tp=2),
    "fan-in 2, cp 2": Layout(1, cp=2),
    "fan-in 4, cp 4": Layout(1, cp=4),
    "fan-in 4, cp 2, pp 2": Layout(1, cp=2, pp=2),
    "equal, cp 2": Layout(2, cp=2),
    "equal, cp 4": Layout(4, cp=4),
    "equal, cp 2, pp 2": Layout(4, cp=2, pp=2),
    "fan-out 2": Layout(2, tp=1),
    "fan-out 2, cp 2": Layout(4, cp=2),
}


def balanced(atoms: int, samples: int, cp: int) -> AtomRows:
    """Return atoms of so many samples, all embeddings, with owners in the zigzag layout."""
    layout = zigzag_layout(pad_lengths([SAMPLE_ROWS], cp), cp)
    owner = (layout.places // layout.shard_size).numpy()
    return AtomRows([samples * SAMPLE_ROWS] * atoms, np.tile(owner, atoms * samples))


def scale_of(topology: BridgeTopology) -> int:
    """Return the number of atoms of a DP index of the side with fewer DP ranks."""
    return topology.atoms // min(topology.src_dp, topology.dest_dp)


def known(topology: BridgeTopology, rank: int) -> tuple[AtomRows, AtomRows]:
    """Return the rows of atoms that a rank encodes, and of those that its DP index consumes."""
    each = SAMPLES // scale_of(topology)
    runs = (topology.encodes(rank), topology.consumes(rank))
    encoded, consumed = (balanced(len(run), each, topology.dest_cp) for run in runs)
    return encoded, consumed


def least_rows(topology: BridgeTopology, rank: int, rows: int) -> tuple[float, float]:
    """Return the rows that a rank lacks, forward and backward, for ``rows`` rows per atom."""
    encoded = set(topology.encodes(rank))
    consumed = set(topology.consumes(rank)) if topology.dest[rank].pp == 0 else set()
    own = len(encoded & consumed) / topology.dest_cp
    return rows * len(consumed - encoded), rows * (len(encoded) - own)


def all_reduced_rows(topology: BridgeTopology, rows: int) -> tuple[float, float]:
    """Return the rows that a rank of a plain bridge receives, forward and backward.

    ``rows`` are those of a block.

    A plain bridge all-gathers embeddings and all-reduces their zero-padded gradients over CP and
    PP. An all-gather over k ranks receives (k-1)/k of its result, a ring all-reduce over n 2(n-1)/n
    of it.
    """
    scale = scale_of(topology)
    gathered = (scale - 1) / scale * rows
    fan_in, fan_out = topology.src_dp > topology.dest_dp, topology.src_dp < topology.dest_dp
    consumed = rows / scale if fan_out else rows
    sizes = (topology.dest_cp, topology.dest_pp)
    summed = sum(2 * (size - 1) / size * consumed for size in sizes)
    return gathered * fan_in, summed + gathered * fan_out


def print_volumes(world: int) -> None:
    """Print bytes received, mean and maximum, and ratios to the minimum and a plain bridge."""
    print(
        "| layout | way | MiB a rank (mean) | (most) | exact / least | all-reduce / exact (most) |"
        "\n|---|---|---:|---:|---:|---:|"
    )
    for name, layout in LAYOUTS.items():
        topology = bridge_topology(*layout.grids(world))
        members = topology.blocks[0]
        rows = SAMPLES * SAMPLE_ROWS
        plan = plan_block(topology, members)
        routes = [
            plan.routes(member, *known(topology, rank)) for member, rank in enumerate(members)
        ]
        exact = [[sum(route.recv_splits) for route in way] for way in zip(*routes, strict=True)]
        each = rows // scale_of(topology)
        least = zip(*(least_rows(topology, rank, each) for rank in members), strict=True)
        plain = all_reduced_rows(topology, rows)
        for way, there, bound, summed in zip(
            ("forward", "backward"), exact, least, plain, strict=True
        ):
            if not max(there):
                continue
            mebibytes = [count * HIDDEN * 2 / 2**20 for count in there]
            print(
                f"| {name} | {way} | {math.fsum(mebibytes) / len(members):.2f} "
                f"| {max(mebibytes):.2f} | {sum(there) / math.fsum(bound):.3f} "
                f"| {summed / max(there):.2f} |"
            )


def print_times() -> None:
    """Print the time of forward and backward, and the ratio of the planning's time to it."""
    device = start()
    world, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        print(
            f"\n| layout, {world} ranks on {device.type} | exchange, ms | planning / exchange |"
            "\n|---|---:|---:|"
        )
    for name, layout in LAYOUTS.items():
        source, destination = layout.grids(world)
        bridge = Bridge(source, destination, dim_mapping={"b": 0, "h": 1})
        exact, planning = _times(bridge, device)
        if rank == 0:
            print(f"| {name} | {1e3 * exact:.1f} | {planning / exact:.2f} |", flush=True)
        bridge.destroy()
        source.destroy()
        destination.destroy()
    dist.destroy_process_group()


def _times(bridge: Bridge, device: torch.device) -> list[float]:
    topology = bridge.topology
    block_rows = SAMPLES * SAMPLE_ROWS
    fan_in = topology.src_dp > topology.dest_dp
    produced = block_rows // scale_of(topology) if fan_in else block_rows
    told = known(topology, dist.get_rank())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.ones(produced, HIDDEN, device=device, dtype=dtype, requires_grad=True)

    def backward(out):
        out.backward(torch.ones_like(out))

    return [
        seconds(call, device)
        for call in (
            lambda: backward(bridge.communicate(x, *told)),
            lambda: bridge.plan_routes(produced, *told, device),
        )
    ]


def main() -> None:
    """Print the volumes, and under torchrun the times."""
    launched = "RANK" in os.environ
    os.environ.setdefault("WORLD_SIZE", "8")
    if not launched or os.environ["RANK"] == "0":
        print_volumes(int(os.environ["WORLD_SIZE"]))
    if launched:
        print_times()


if __name__ == "__main__":
    main()
