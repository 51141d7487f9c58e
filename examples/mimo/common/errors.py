# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run with one line and exit code 2."""

import re
import sys

BAD_INPUT = 2

CONTACT = {
    r"timed? ?out": "another rank did not answer within the limit (--distributed-timeout-minutes, "
    "--distributed-timeout-seconds-after-init): it hangs, or the network between them does",
    r"connection|broken pipe|socket|remote": "another rank has gone, or cannot be reached",
}
"""What a collective's error means, by a pattern in its text."""


def report(text: str) -> None:
    """Print an error's line on stderr; on a terminal, below the progress bar."""
    below = "\n" if sys.stderr.isatty() else ""
    print(f"{below}error: {text}", file=sys.stderr, flush=True)


class UserError(Exception):
    """An error that the user can fix; its text is one line that names the fact and the fix.

    Args:
        text: the line of text.
        rank: the rank that found it, if others may not know; None if all ranks raise the same.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text if rank is None else f"rank {rank}: {text}")
        self.rank = rank


def lost_contact(error: BaseException) -> str | None:
    """Say in one line that a collective has failed, and why; None if the error is another one."""
    text = " ".join(str(error).split())
    if not re.search(r"(?i)gloo|nccl|c10d", f"{type(error).__module__} {text}"):
        return None
    for pattern, meaning in CONTACT.items():
        if re.search(pattern, text, re.IGNORECASE):
            found = re.sub(r"\[/[^\]]*\] ?", "", text)  # the place in PyTorch's source
            return f"{meaning} ({found[:200]})"
    return None
