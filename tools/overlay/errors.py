# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of the tools, with their exit codes."""

from collections.abc import Iterable

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


def refuse(code: int, message: str, names: Iterable[str]) -> None:
    """Raise OverlayError with a line for each name, if there are any."""
    if lines := [message.format(name) for name in names]:
        raise OverlayError(code, *lines)
