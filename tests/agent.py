# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""torchrun's agent over ranks of this host that are forked: what is imported before is shared.

Under torchrun itself, each rank takes seconds to import Megatron. This is for CPU ranks: a process
that has CUDA in use cannot be forked.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

HANDLERS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""Of signals in a rank; the agent raises, which a rank would take for a failure of its own."""


def run_ranks(size: int, rank: Callable[..., None], *arguments, restarts: int = 0) -> int:
    """Call a function on each rank, with torchrun's environment.

    Args:
        size: number of ranks.
        rank: returns where the rank has succeeded, and raises or exits where not.
        restarts: how often all ranks start again after one has failed.

    Returns:
        0 if all succeeded, else 1; stderr says then which rank failed first.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="tests",
        max_restarts=restarts,
        start_method="fork",
    )
    gc.freeze()  # what is imported stays shared with the ranks
    try:
        elastic_launch(config, _rank)(rank, arguments)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def _rank(rank: Callable[..., None], arguments: tuple) -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    rank(*arguments)
