# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rank-local facts become decisions of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.errors import UserError

T = TypeVar("T")


def agreed(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on any, fail on all with the same message.

    A collective over the default group, of one number unless something failed. Rank-local facts (a
    missing directory on one node, a bad sample that only one rank read) must not let one rank stop
    while the others wait for it.

    Raises:
        UserError: on every rank, if ``action`` raised one on any: the lowest such rank's.
    """
    result, failure = None, None
    try:
        result = action()
    except UserError as error:
        failure = str(error)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    failed = torch.tensor(int(failure is not None), device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed:
        return result
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    rank, text = next((rank, text) for rank, text in enumerate(failures) if text is not None)
    raise UserError(text if all(failures) else f"rank {rank}: {text}")
