#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Make and print the survey of a data set for --data energon, from this repository.

tools/data/survey.py PATH --tokenizer DIR --tile 16 --tokens-per-tile 4 [--workers N] …

In a checkout with the overlay, python -m examples.mimo.nemotron_vlm.energon does the same.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    try:
        from examples.mimo.nemotron_vlm.energon.__main__ import main
    except ImportError as error:
        sys.exit(f"error: {error}")
    sys.exit(main())
