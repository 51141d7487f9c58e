# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of the benchmarks over several ranks: starting them, and timing collective calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ON_GPUS = torch.cuda.is_available()
"""Whether there are GPUs; without one, the CPU runtime takes the CPU for the device ``cuda``."""


def start() -> None:
    """Join all ranks that torchrun started, each with a device."""
    if not ON_GPUS:
        from megatron.core import cpu_runtime

        cpu_runtime.install()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")


def take_turns(calls: list[Callable[[], object]], turns: int) -> list[list[float]]:
    """Return each call's seconds on its slowest rank in every turn, after a turn for warm-up.

    The calls take turns, so that a disturbance affects all of them; ranks start each together.
    """
    found = torch.zeros(turns + 1, len(calls), device="cuda")
    for turn in found:
        for place, call in enumerate(calls):
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            turn[place] = time.perf_counter() - started
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found[1:].T.tolist()
