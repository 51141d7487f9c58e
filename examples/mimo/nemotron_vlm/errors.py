# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run on every rank alike, with one line: exit code 2, or 1 for a failed run."""

BAD_INPUT = 2
FAILED = 1


class UserError(Exception):
    """A fact the user can mend; its text is one line that names the fact and the fix."""


class RunFailed(Exception):
    """Training cannot go on; its text is one line. What was saved stays."""
