# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run torchrun's agent over forked ranks of this host: they share what was imported before.

Under torchrun itself, each rank takes seconds to import Megatron. This is for CPU ranks: a process
that has CUDA in use cannot be forked.
"""

import faulthandler
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
"""Signal handlers of a rank. The agent's raise, which would count as a failure of the rank."""


def run_ranks(size: int, rank: Callable[..., None], *arguments, restarts: int = 0) -> int:
    """Call a function on each rank, with torchrun's environment.

    Args:
        size: number of ranks.
        rank: the function; it returns if the rank succeeds, and raises or exits if it fails.
        restarts: how often all ranks start again after one has failed.

    Returns:
        0 if all succeeded; else 1, and stderr says which rank failed first.
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
        start_method="fork",
        max_restarts=restarts,
        monitor_interval=0.01,  # seconds: other ranks soon fail too
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )
    gc.freeze()  # what is imported stays shared with the ranks
    try:
        elastic_launch(config, _rank)(rank, arguments)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        print(f"rank {_first(failure, logs)} failed first", file=sys.stderr)
        return 1
    finally:
        gc.unfreeze()  # Triton's bindings report objects that the interpreter's end does not free
    return 0


def _first(failure: ChildFailedError, logs: str) -> int:
    """Return the rank that failed first: the agent names any rank that ended before it looked.

    A rank killed by a signal writes no file; those of ranks that raise after it are newer.
    """
    named, found = failure.get_first_failure()
    written = Path(logs).rglob("error.json")  # one of each rank that raised, in its folder
    if found.exitcode > 0 and (errors := sorted(written, key=lambda file: file.stat().st_mtime_ns)):
        return int(errors[0].parent.name)
    return named


def _rank(rank: Callable[..., None], arguments: tuple) -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    faulthandler.register(signal.SIGUSR1)  # shows the stacks of a rank that hangs
    rank(*arguments)
