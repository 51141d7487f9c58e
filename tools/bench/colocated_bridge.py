# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Print the bytes that each rank of the colocated bridge receives, against the minimum.

Usage, with the checkout on PYTHONPATH: python tools/bench/colocated_bridge.py [RANKS]
"""

import math
import os
import sys

import numpy as np

from megatron.core.context_parallel_layout import pad_lengths, zigzag_layout
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.bridge_plan import plan_block
from megatron.core.models.mimo.comm.bridge_topology import BridgeTopology, bridge_topology
from megatron.core.models.mimo.comm.sample_rows import SampleRows

SAMPLE_ROWS = 256
SAMPLES = 8
"""Samples of a DP rank on the side with fewer DP ranks."""
HIDDEN = 2688

LAYOUTS = {
    "fan-in 2": (1, 2, 1, 1),
    "fan-in 2, cp 2": (1, 1, 2, 1),
    "fan-in 4, cp 4": (1, 1, 4, 1),
    "fan-in 4, cp 2, pp 2": (1, 1, 2, 2),
    "equal, cp 2": (2, 1, 2, 1),
    "equal, cp 4": (4, 1, 4, 1),
    "equal, cp 2, pp 2": (4, 1, 2, 2),
    "fan-out 2": (2, 1, 1, 1),
    "fan-out 2, cp 2": (4, 1, 2, 1),
}
"""TP of the source; TP, CP and PP of the destination. DP is the rest."""


def balanced(samples: int, cp: int) -> SampleRows:
    """Return samples whose tokens are all embeddings, with their owners in the zigzag layout."""
    layout = zigzag_layout(pad_lengths([SAMPLE_ROWS], cp), cp)
    owner = (layout.places // layout.shard_size).numpy()
    return SampleRows([SAMPLE_ROWS] * samples, np.tile(owner, samples))


def received_rows(topology: BridgeTopology, members: list[int]) -> list[list[int]]:
    """Return the rows that each rank of a block receives, forward and backward."""
    plan, each, routes = plan_block(topology, members), SAMPLES // topology.scale, []
    for member, rank in enumerate(members):
        runs = (topology.encodes(rank), topology.consumes(rank))
        rows = (balanced(len(run) * each, topology.dest_cp).in_atoms(len(run)) for run in runs)
        routes.append(plan.routes(member, *rows))
    return [[sum(route.recv_splits) for route in way] for way in zip(*routes, strict=True)]


def least_rows(topology: BridgeTopology, rank: int) -> tuple[float, float]:
    """Return the rows that a rank lacks, forward and backward."""
    rows = SAMPLES * SAMPLE_ROWS // topology.scale
    encoded = set(topology.encodes(rank))
    consumed = set(topology.consumes(rank)) if topology.dest[rank].pp == 0 else set()
    own = len(encoded & consumed) / topology.dest_cp
    return rows * len(consumed - encoded), rows * (len(encoded) - own)


def main(world: int) -> None:
    """Print bytes received, mean and maximum of a block, and the ratio to the minimum."""
    os.environ["WORLD_SIZE"] = str(world)  # read by grids
    print("| layout | way | MiB a rank (mean) | (most) | exact / least |\n|---|---|---:|---:|---:|")
    for name, (src_tp, tp, cp, pp) in LAYOUTS.items():
        source = HyperCommGrid([src_tp, world // src_tp], ["tp", "dp"])
        shape = [tp, cp, world // (tp * cp * pp), pp]
        topology = bridge_topology(source, HyperCommGrid(shape, ["tp", "cp", "dp", "pp"]))
        members = topology.blocks[0]
        least = zip(*(least_rows(topology, rank) for rank in members), strict=True)
        ways = zip(("forward", "backward"), received_rows(topology, members), least, strict=True)
        for way, rows, bound in ways:
            if max(rows):
                mebibytes = [count * HIDDEN * 2 / 2**20 for count in rows]
                print(
                    f"| {name} | {way} | {math.fsum(mebibytes) / len(members):.2f} "
                    f"| {max(mebibytes):.2f} | {sum(rows) / math.fsum(bound):.3f} |"
                )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
