# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Join the ranks of a run, also of one that torchrun has started again."""

from __future__ import annotations

import os

import torch.distributed as dist


def join_ranks(backend: str) -> None:
    """Make the default process group, from the environment that torchrun sets.

    torchrun may keep one store for all attempts (PyTorch 2.13 does, without a prefix for each);
    ranks of a later attempt would find the addresses of processes that are gone.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt/{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
