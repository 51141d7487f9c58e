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
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
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
    with tempfile.TemporaryDirectory() as logs:
        return _run(size, rank, arguments, restarts, logs)


def _run(size: int, rank: Callable, arguments: tuple, restarts: int, logs: str) -> int:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="tests",
        max_restarts=restarts,
        start_method="fork",
        monitor_interval=0.01,  # seconds: others soon fail too
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )
    gc.freeze()  # what is imported stays shared with the ranks
    try:
        elastic_launch(config, _rank)(rank, arguments)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        print(f"rank {_first(failure, logs)} failed first", file=sys.stderr)
        return 1
    return 0


def _first(failure: ChildFailedError, logs: str) -> int:
    """Which rank failed first: the agent names any of those that ended before it looked.

    A rank that was killed by a signal writes nothing; what others then raise is newer.
    """
    named, found = failure.get_first_failure()
    written = Path(logs).rglob("error.json")  # of ranks that raised, in a folder of the rank's
    if found.exitcode > 0 and (errors := sorted(written, key=lambda file: file.stat().st_mtime_ns)):
        return int(errors[0].parent.name)
    return named


def _rank(rank: Callable[..., None], arguments: tuple) -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    rank(*arguments)
