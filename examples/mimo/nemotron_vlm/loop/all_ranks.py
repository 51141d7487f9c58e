# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Work that may fail on one rank: all ranks learn of it."""

from collections.abc import Callable

import torch.distributed as dist

from examples.mimo.common.errors import one_line
from megatron.core.dist_checkpointing.first_rank import RAISED

LONGEST = 300
"""Characters of an error that all ranks learn."""


def on_all_ranks(function: Callable[[], object]) -> tuple[list, list[str]]:
    """Call a function on all ranks; return what each has returned, and the errors of any."""
    result, error = None, None
    try:
        result = function()
    except RAISED as raised:  # whatever is in a damaged file
        error = f"rank {dist.get_rank()}: {one_line(raised)[:LONGEST]}"
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (result, error))
    return [value for value, _ in everywhere], [error for _, error in everywhere if error]
