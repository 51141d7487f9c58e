# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run pytest on N ranks of this host: under torchrun's agent, but with what they import shared.

    python -m tests.ranks N [pytest arguments]

The ranks are forked from a process that has imported Megatron, which takes each of them seconds
under torchrun itself. That is for CPU ranks: one that has CUDA in use cannot be forked.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

IMPORTED_ONCE = ("examples.mimo.nemotron_vlm.run", "hypothesis", "transformers")
HANDLERS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""Of signals in a rank; the agent raises, which a test would take for its own failure."""

DONE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def main(size: int, arguments: list[str]) -> int:
    """Run the ranks to their end; returns 0 if all passed."""
    for module in IMPORTED_ONCE:
        import_module(module)
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
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
