# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rank-local facts become decisions of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from examples.mimo.nemotron_vlm.errors import UserError


def agreed(check: Callable[[], None]) -> None:
    """Run ``check`` on every rank; if it fails on any, fail on all with the lowest rank's message.

    A collective over the default group. Rank-local facts (a missing directory on one node, a bad
    file that only one rank read) must not let one rank stop while the others wait for it.

    Raises:
        UserError: on every rank, if ``check`` raised one on any.
    """
    failure = None
    try:
        check()
    except UserError as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, text in enumerate(failures):
        if text is not None:
            raise UserError(text if all(failures) else f"rank {rank}: {text}")
