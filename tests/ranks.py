# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run pytest on N ranks of this host, which are forked from a process that has imported all tests.

    python -m tests.ranks N[,N...] [pytest arguments]      e.g. 2,4,8: one world after the other

The tests are collected once for all worlds, before the forks: under torchrun itself, each rank
takes seconds to import Megatron. A process that has CUDA in use cannot be forked.
"""

import contextlib
import faulthandler
import gc
import io
import signal
import sys
import tempfile
from collections.abc import Callable

import pytest
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
    """Call a function on each rank, with torchrun's environment, under torchrun's agent.

    Args:
        size: number of ranks.
        rank: the function; it returns if the rank succeeds, and raises or exits if it fails.
        restarts: how often all ranks start again after one has failed.

    Returns:
        0 if all succeeded; else 1, and stderr has the agent's report.
    """
    gc.freeze()  # what is imported stays shared with the ranks
    try:
        with tempfile.TemporaryDirectory() as logs:
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
            elastic_launch(config, _rank)(rank, arguments)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    finally:
        gc.unfreeze()  # Triton's bindings report objects that the interpreter's end does not free
    return 0


def _rank(rank: Callable[..., None], arguments: tuple) -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    faulthandler.register(signal.SIGUSR1)  # shows the stacks of a rank that hangs
    rank(*arguments)


DONE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class SameTests:
    """Ends a world that collects other tests than the first collection: rows that a generator
    yields, say, are there only once."""

    def __init__(self) -> None:
        self.found: set[str] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid for item in items}
        if self.found is not None and found != self.found:
            first = min(found ^ self.found)
            raise pytest.UsageError(f"{first} was not collected each time: give its rows as a list")
        self.found = found


SAME_TESTS = SameTests()


def main(sizes: list[int], arguments: list[str]) -> int:
    """Run each world to its end; returns 0 if all passed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*arguments, "--collect-only"], plugins=[SAME_TESTS])
    if code not in DONE:
        print(said.getvalue())
        return int(code)
    failed = 0
    for size in sizes:
        print(f"\n===== {size} ranks", flush=True)
        failed |= run_ranks(size, _tests, arguments)
    return failed


def _tests(arguments: list[str]) -> None:
    # What libraries write before they abort must not be lost with pytest's captured files.
    code = pytest.main(["--capture=sys", *arguments], plugins=[SAME_TESTS])
    if code not in DONE:
        sys.exit(int(code))


if __name__ == "__main__":
    sys.exit(main([int(size) for size in sys.argv[1].split(",")], sys.argv[2:]))
