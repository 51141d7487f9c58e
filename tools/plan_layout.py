#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan the layouts of a training run, measure a machine, or simulate a week of failures.

tools/plan_layout.py --model nano-vl-30b-a3b --gpus 64 --gpu h200 --global-batch-size 256
tools/plan_layout.py calibrate --out cpu.json
tools/plan_layout.py goodput --gpus 1024 --step-seconds 2

It takes the applied checkout on PYTHONPATH, or that in build/Megatron-LM.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from applied_checkout import fail, prepare


def main(argv: list[str]) -> int:
    """Run it; returns the exit status, 2 for what a user got wrong."""
    if problem := prepare():
        return fail(problem)
    from examples.mimo.nemotron_vlm.errors import UserError
    from planner.cli import read

    options = read(argv)
    os.environ["WORLD_SIZE"] = str(getattr(options, "gpus", 1))  # which grids are held to
    try:
        options.run(options)
    except (UserError, OSError) as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
