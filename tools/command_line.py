# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of the tools' command lines."""

from __future__ import annotations

import argparse


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")


def positive(text: str) -> int:
    """Parse an integer of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def share(text: str) -> float:
    """Parse a number between 0 and 1, both excluded."""
    try:
        if 0 < float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")


def numbers(text: str) -> list[int]:
    """Parse comma-separated integers of 1 or more."""
    return [positive(part) for part in text.split(",")]
