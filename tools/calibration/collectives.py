# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Time of collectives between ranks of this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.planner.machine import Machine

SMALL = 2**12
LARGE = {"cpu": 2**22, "cuda": 2**26}
"""Approximate bytes of the collectives that give the latency, and of those for the bandwidth."""
REPEATS, ROUNDS = 50, 7
MATRIX = 512
"""Rows of the square matrices multiplied before each collective, as ranks work before one."""
CROWD = 2
"""CPU ranks per core, which take turns at each collective, as in training."""


def with_collectives(machine: Machine, measured: list[dict]) -> Machine:
    """Return the machine with the latency and bandwidth of ``measured`` collectives, if any."""
    if not measured:
        return machine
    hops = measured[0]["ranks"] - 1
    few, many = sorted({one["bytes"] for one in measured})
    small, large = (
        np.mean([one["seconds"] for one in measured if one["bytes"] == size])
        for size in (few, many)
    )
    latency = float(small / hops)
    bandwidth = float((many - few) * hops / (hops + 1) / max(large - small, 1e-9))
    return replace(
        machine,
        node_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_efficiency=1.0,
        node_latency=latency,
        network_latency=latency,
    )


def timed_collectives(device: str) -> list[dict]:
    """Time collectives between two GPUs of this host, if it has them, or between CPU ranks.

    CPU ranks share cores, and their seconds are processor time.
    """
    ranks = 2 if device == "cuda" else CROWD * len(os.sched_getaffinity(0))
    if device == "cuda" and torch.cuda.device_count() < ranks:
        return []
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(ranks), "-m", "calibration.collectives", device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(launch, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"collectives: {done.stderr[-500:]}", file=sys.stderr)
        return []
    return json.loads(done.stdout.splitlines()[-1])


def _time_collectives(device: str) -> None:
    """Time small and large collectives on this rank; rank 0 prints the seconds."""
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    clock = time.perf_counter if on_gpu else time.process_time
    ranks, matrix, taken = dist.get_world_size(), torch.rand(MATRIX, MATRIX), []

    def seconds(collective: Callable[..., object], *tensors: torch.Tensor) -> float:
        dist.barrier()
        float(matrix[0, 0])  # waits for the device
        begin = clock()
        for _ in range(REPEATS):
            matrix @ matrix
            collective(*tensors)
        float(matrix[0, 0])
        return (clock() - begin) / REPEATS

    for size in (SMALL, LARGE[device]):
        part = torch.zeros(size // 4 // ranks)
        whole = part.repeat(ranks)
        ways = {
            "all-gather": (dist.all_gather_into_tensor, whole, part),
            "reduce-scatter": (dist.reduce_scatter_tensor, part, whole),
        }
        for name, way in ways.items():
            seconds(*way)  # warms up
            more = [seconds(*way) - seconds(lambda: None) for _ in range(ROUNDS)]
            found = {"collective": name, "ranks": ranks, "bytes": whole.nbytes}
            taken.append(found | {"seconds": float(np.median(more))})
    if rank == 0:
        print(json.dumps(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    _time_collectives(sys.argv[1])
