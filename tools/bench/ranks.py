# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of the benchmarks over several ranks: starting them, and timing collective calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


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


def take_turns(
    calls: list[Callable[[], object]], device: torch.device, turns: int
) -> list[list[float]]:
    """Return each call's seconds on its slowest rank in every turn, after a turn for warm-up.

    The calls take turns, so that a disturbance affects all of them; ranks start each together.
    """
    found = torch.zeros(turns + 1, len(calls), device=device)
    for turn in found:
        for place, call in enumerate(calls):
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
            call()
            synchronize(device)
            turn[place] = time.perf_counter() - started
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found[1:].T.tolist()
