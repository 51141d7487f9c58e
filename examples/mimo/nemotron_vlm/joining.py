# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Join the ranks of a run, also of one that torchrun has started again."""

from __future__ import annotations

import os

import torch.distributed as dist


def store_of_attempt() -> dist.Store | None:
    """The store in which the ranks of this attempt meet; None for PyTorch's own choice.

    torchrun may keep one store for all attempts (PyTorch 2.13 does, without a prefix for each);
    ranks of a later attempt would find the addresses of processes that are gone.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    return dist.PrefixStore(f"attempt/{attempt}", store)
