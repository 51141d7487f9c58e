# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""torchrun that ends with the line and the exit code of the rank that failed first.

    python -m examples.mimo.common.launch --nproc-per-node 4 \\
        examples/mimo/pretrain_nemotron_vlm.py --encoder tp=2,dp=2 --train-iters 20

torchrun itself ends with a traceback of its own, a report on every rank, and exit code 1.

If a signal ends the launcher, its last line says what is saved and how to go on. The exit code is
then 128 and the signal's number; 0 if the ranks have saved and left, as ``--exit-signal`` asks.
"""

import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

from examples.mimo.common.errors import NOTED, report
from examples.mimo.common.standing import ENDING, SIGNALLED, Standing

PASSED_ON = signal.SIGUSR1, signal.SIGUSR2
"""Signals that the launcher passes on to its ranks; they would end torchrun."""


def launch(argv: list[str]) -> int:
    """Run torchrun with these arguments; return the exit code."""
    logging.getLogger(SignalException.__module__).setLevel(logging.ERROR)  # a line for each rank
    for number in PASSED_ON:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _pass_on)
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder, "standing.json")
        os.environ[NOTED] = str(noted)
        try:
            main.__wrapped__(argv)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            asked = -first.exitcode in ENDING
            report(_line(rank, first) + (f": {Standing.noted(noted)}" if asked else ""))
            return first.exitcode if first.exitcode > 0 else SIGNALLED - first.exitcode
        except (SignalException, KeyboardInterrupt) as ended:
            number = getattr(ended, "sigval", signal.SIGINT)
            standing = Standing.noted(noted)
            if not standing.has_left:
                report(f"ended by {signal.Signals(number).name}: {standing}")
                return SIGNALLED + number
    return 0


def _pass_on(number: int, _frame: object) -> None:
    for process in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(process), number)


def _line(rank: int, failure: ProcessFailure) -> str:
    """Return the line that the rank has left, or else how it ended."""
    if isinstance(failure.message, dict):
        return failure.message["message"].removeprefix("error: ")
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank} ended with {how}"


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
