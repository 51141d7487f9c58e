# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of the tools, with their exit codes."""

from collections.abc import Sequence

FAILED = 1  # the patch set is inconsistent, or the machine refused an operation
USAGE = 2
NOT_THE_PIN = 3  # not a Megatron-LM checkout, or the wrong version
DIFFERS_FROM_LOCK = 4
LOCAL_EDITS = 5


class OverlayError(Exception):
    """A refusal. Every argument after the code is one line for the user."""

    def __init__(self, code: int, *lines: str):
        super().__init__(*lines)
        self.code = code
        self.lines = lines


def refuse(code: int, lines: Sequence[str]) -> None:
    """Raise OverlayError if there are lines that say why."""
    if lines:
        raise OverlayError(code, *lines)
