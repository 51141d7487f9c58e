# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run on every rank alike, with one line: exit code 2, or 1 for a failed run."""

import sys

BAD_INPUT = 2
FAILED = 1


def report(text: str) -> None:
    """Print an error's line on stderr; on a terminal, below the progress bar."""
    below = "\n" if sys.stderr.isatty() else ""
    print(f"{below}error: {text}", file=sys.stderr, flush=True)


class UserError(Exception):
    """A fact the user can mend; its text is one line that names the fact and the fix."""


class RunFailed(Exception):
    """Training cannot go on; its text is one line. What was saved stays."""
