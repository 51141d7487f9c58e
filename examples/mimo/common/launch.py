# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""torchrun that ends with the line and the exit code of the rank that failed first.

    python -m examples.mimo.common.launch --nproc-per-node 4 \\
        examples/mimo/pretrain_nemotron_vlm.py --encoder tp=2,dp=2 --train-iters 20

torchrun itself ends with a traceback of its own, a report on every rank, and exit code 1.
"""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

from examples.mimo.common.errors import LAUNCHED, report

SIGNALLED = 128
"""Exit code of a process that a signal has ended, without the signal's number; as in shells."""


def launch(argv: list[str]) -> int:
    """Run torchrun with these arguments; return the exit code."""
    os.environ[LAUNCHED] = "1"
    try:
        main.__wrapped__(argv)
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        report(_line(rank, first))
        return first.exitcode if first.exitcode > 0 else SIGNALLED - first.exitcode
    return 0


def _line(rank: int, failure: ProcessFailure) -> str:
    """Return the line that the rank has left, or else how it ended."""
    if isinstance(failure.message, dict):
        return failure.message["message"].removeprefix("error: ")
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank} ended with {how}"


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
