# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What collectives of two ranks of this host take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.planner.machine import Machine

SMALL = 2**12
LARGE = {"cpu": 2**22, "cuda": 2**26}
"""Bytes of the collectives that give latency and bandwidth."""
REPEATS = 20


def with_collectives(machine: Machine, measured: list[dict]) -> Machine:
    """The machine with the latency and bandwidth of collectives, where they were measured."""
    if not measured:
        return machine
    latency = np.mean([one["seconds"] for one in measured if one["bytes"] == SMALL])
    large = np.mean([one["seconds"] for one in measured if one["bytes"] != SMALL])
    size = max(one["bytes"] for one in measured)
    bandwidth = (size - SMALL) / 2 / max(large - latency, 1e-9)
    return replace(
        machine,
        node_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_efficiency=1.0,
        node_latency=latency,
        network_latency=latency,
    )


def timed_collectives(device: str) -> list[dict]:
    """Seconds of collectives of two ranks of this host; none with one GPU."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        return []
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "calibration.collectives", device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(launch, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"collectives: {done.stderr[-500:]}", file=sys.stderr)
        return []
    return json.loads(done.stdout.splitlines()[-1])


def _time_collectives(device: str) -> None:
    """On one of two ranks: print what small and large collectives take."""
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    clock = time.perf_counter if on_gpu else time.process_time
    taken = []
    for size in (SMALL, LARGE[device]):
        whole, part = torch.zeros(size // 4), torch.zeros(size // 8)
        ways = {
            "all-gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce-scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(
                part, whole
            ),
            "all-to-all": lambda whole=whole: dist.all_to_all_single(whole.clone(), whole),
        }
        for name, collective in ways.items():
            for count in (5, REPEATS):  # the first ones warm up
                dist.barrier()
                float(whole[0])  # waits for the device
                begin = clock()
                for _ in range(count):
                    collective()
                float(whole[0])
                seconds = (clock() - begin) / count
            taken.append({"collective": name, "bytes": size, "seconds": seconds})
    if rank == 0:
        print(json.dumps(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    _time_collectives(sys.argv[1])
