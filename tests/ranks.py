# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run pytest on N ranks of this host: under torchrun's agent, but with what they import shared.

    python -m tests.ranks N[,N...] [pytest arguments]      e.g. 2,4,8: one world after the other

The ranks are forked from a process that has imported all tests, and with them Megatron, which takes
each of them ten seconds under torchrun itself. That is for CPU ranks: one that has CUDA in use
cannot be forked.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

HANDLERS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""Of signals in a rank; the agent raises, which a test would take for its own failure."""

DONE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def main(sizes: list[int], arguments: list[str]) -> int:
    """Run each world to its end; returns 0 if all passed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*arguments, "--collect-only"])
    if code not in DONE:
        print(said.getvalue())
        return int(code)
    return max([_world(size, arguments) for size in sizes])


def _world(size: int, arguments: list[str]) -> int:
    """Run the tests on that many ranks; returns 0 if all passed."""
    print(f"\n===== {size} ranks", flush=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="tests",
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(config, _rank)(arguments)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def _rank(arguments: list[str]) -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    code = pytest.main(arguments)
    if code not in DONE:
        sys.exit(int(code))


if __name__ == "__main__":
    sys.exit(main([int(size) for size in sys.argv[1].split(",")], sys.argv[2:]))
