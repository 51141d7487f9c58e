# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Errors of the user's making: one line, the same on every rank, exit code 2."""

EXIT_CODE = 2


class UserError(Exception):
    """A fact the user can mend; its text is one line that names the fact and the fix."""
