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
    """Run the tool, and end the process with its exit code."""
    from examples.mimo.nemotron_vlm.energon.__main__ import main

    sys.exit(main())


if __name__ == "__main__":
    sys.exit(run(survey))
