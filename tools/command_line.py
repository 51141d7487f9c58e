# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the tools' command lines share."""

from __future__ import annotations

import argparse


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")


def positive(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def share(text: str) -> float:
    """A number between 0 and 1."""
    try:
        if 0 < float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")


def numbers(text: str) -> list[int]:
    """Numbers of 1 or more, with commas between."""
    return [positive(part) for part in text.split(",")]
