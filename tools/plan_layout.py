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

import os
import sys

from in_checkout import run


def main(argv: list[str]) -> int:
    """Run it; returns the exit status, 2 for what a user got wrong."""
    if "calibrate" not in argv:  # nothing is compiled, and PyTorch's compiler is slow to import
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return run(lambda: _main(argv))


def _main(argv: list[str]) -> None:
    from planner.cli import read

    options = read(argv)
    os.environ["WORLD_SIZE"] = str(getattr(options, "gpus", 1))  # which grids are held to
    options.run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
