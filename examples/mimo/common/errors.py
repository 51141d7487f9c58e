# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run with one line and exit code 2."""

import sys

BAD_INPUT = 2


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
