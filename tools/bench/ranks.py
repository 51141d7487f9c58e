# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of the benchmarks over several ranks: starting them, and timing collective calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ROUNDS, CALLS = 5, 3


def start() -> torch.device:
    """Join all ranks that torchrun started, with NCCL or gloo; return this rank's device."""
    cuda, device = torch.cuda.is_available(), torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


def synchronize(device: torch.device) -> None:
    """Wait for all work that was started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call in the fastest round; ranks start each round together."""
    call()
    rounds = []
    for _ in range(ROUNDS):
        synchronize(device)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        synchronize(device)
        rounds.append(time.perf_counter() - started)
    return min(rounds) / CALLS


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one step on the slowest rank."""
    synchronize(device)
    dist.barrier()
    started = time.perf_counter()
    step()
    synchronize(device)
    seconds = torch.tensor(time.perf_counter() - started, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()
