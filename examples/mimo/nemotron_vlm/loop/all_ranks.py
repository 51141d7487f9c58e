# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Work that may fail on one rank: all ranks learn of it."""

from collections.abc import Callable

import torch.distributed as dist

from megatron.core.dist_checkpointing.first_rank import RAISED


def on_all_ranks(function: Callable[[], object]) -> tuple[list, list[str]]:
    """Call a function on all ranks; return what each has returned, and the errors of any."""
    result, error = None, None
    try:
        result = function()
    except RAISED as raised:  # whatever is in a damaged file
        error = f"rank {dist.get_rank()}: {one_line(raised)}"
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (result, error))
    return [value for value, _ in everywhere], [error for _, error in everywhere if error]


def one_line(error: BaseException) -> str:
    """Return an error's text as one line, cut off where it is long."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
