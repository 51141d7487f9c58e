# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run: their line is the last on the terminal, also in torchrun's report."""

import json
import os
import re
import sys
import time
import traceback

BAD_INPUT, FAILED = 2, 1
"""Exit codes."""

LOST = re.compile("by peer|Broken pipe|[Tt]imed out|timeout|remote|aborted")
"""Words of errors of which another rank is the cause."""

SILENT = "did not answer within --distributed-timeout-minutes: it hangs, or the network does"

REJECTED = 16, 17
"""Exit codes of Megatron's rerun state machine, which prints nothing on the terminal."""

NOT_FINITE = (
    "the loss of a step is not finite, or another check of Megatron's has failed (its log says "
    "which): lower --lr, or skip such steps with --no-check-for-nan-in-loss-and-grad"
)

NOTED = "MIMO_STANDING"
"""Variable of the environment of ranks whose launcher ends with their line (``launch.py``): the
file that tells it of its host's `Standing`."""

GRACE_S = 2
"""Seconds that a rank waits when it has lost another, which torchrun then notices first."""


def report(text: str) -> None:
    """Print an error's line on stderr; on a terminal, below the progress bar."""
    below = "\n" if sys.stderr.isatty() else ""
    print(f"{below}error: {text}", file=sys.stderr, flush=True)


class UserError(Exception):
    """An error that the user can fix; its text is one line that names the fact and the fix.

    Args:
        rank: the rank that found it, if others may not know; None if all ranks raise the same.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text if rank is None else f"rank {rank}: {text}")
        self.rank = rank


def one_line(error: BaseException) -> str:
    """Return an error's message as one line; its type if it has none."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line.encode(errors="backslashreplace").decode()  # half a character cannot be printed


def end_rank(error: Exception | SystemExit) -> int:
    """Report the error that ends this rank, and return the exit code.

    The line of bad input comes from one rank, or from the launcher; a rank that has lost another
    prints one line, too. Other errors have a traceback above theirs.
    """
    rank, code = os.environ["RANK"], FAILED
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        code, text = BAD_INPUT, str(error)
        if (error.rank is not None or rank == "0") and not _is_last_attempt():
            report(text)
    elif isinstance(error, SystemExit):
        if error.code not in REJECTED:
            raise error
        code, text = error.code, NOT_FINITE
        if rank == "0" and not _is_last_attempt():
            report(text)
    elif _is_of_a_peer(error):
        reason = re.sub(r"^\[.*?\] *", "", text).partition(". ")[0][:120]
        found = SILENT if re.search("(?i)timed? ?out", text) else "has ended or hangs"
        text = f"rank {rank} has lost another rank, which {found}: {reason}"
        report(text)
        time.sleep(GRACE_S)
    else:
        traceback.print_exception(error)
        text = f"rank {rank}: {type(error).__name__}: {text[:600]}"
        report(text)
    _note(f"error: {text}")
    return code


def _is_last_attempt() -> bool:
    """Return whether the launcher will end with a line of this attempt, and not start another."""
    attempt, last = (os.environ.get(f"TORCHELASTIC_{n}") for n in ("RESTART_COUNT", "MAX_RESTARTS"))
    return bool(os.environ.get(NOTED)) and attempt is not None and attempt == last


def _is_of_a_peer(error: Exception) -> bool:
    """Return whether gloo, or PyTorch for NCCL or a store, says that another rank is missing."""
    is_of_transport = type(error).__name__.startswith("Dist") or "/gloo/" in str(error)
    return is_of_transport and bool(LOST.search(str(error)))


def _note(text: str) -> None:
    """Write the line for torchrun, whose report ends with that of the rank that ended first."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        of_report = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": of_report}}, file)
