# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of the tools' command lines."""

import argparse

BATCH = 8
"""Questions that are answered at a time."""
DEVICE = "of the model; cuda, in bf16, where there is a GPU"


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")


def positive(text: str, least: int = 1) -> int:
    """Parse an integer of 1 or more, or of ``least``."""
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a number of {least} or more")
    return int(text)


def numbers(text: str) -> list[int]:
    """Parse comma-separated integers of 1 or more."""
    return [positive(part) for part in text.split(",")]
