#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Make and print the survey of a data set for --data energon, from this repository.

tools/data/survey.py PATH --model NAME --tokenizer-model DIR [--workers N] [options of the training]

In a checkout with the overlay, python -m examples.mimo.nemotron_vlm.energon does the same.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from in_checkout import run  # noqa: E402


def survey() -> None:
    """Run the tool; end the process where it refuses."""
    try:
        from examples.mimo.nemotron_vlm.energon.__main__ import main
    except ImportError as error:
        sys.exit(f"error: {error}")
    if code := main():
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(run(survey))
