#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure a machine for the layout planner, or compare predictions with measured runs.

tools/calibrate.py fit gpu.json --gpu h100
tools/calibrate.py compare gpu.json docs/benchmarks/*.json

It uses the applied checkout on PYTHONPATH, or that in build/Megatron-LM.
"""

import argparse
import os
import sys
from pathlib import Path

from command_line import Parser
from in_checkout import run


def main(argv: list[str]) -> int:
    """Run the command; return the exit status, 2 for user errors."""
    options = _parser().parse_args(argv)
    of_runs = dict(os.environ)  # this process only predicts, without GPUs; its runs see them
    os.environ["WORLD_SIZE"] = "4096"  # grids must fit into this world
    return run(lambda: _run(options, of_runs))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="measure a GPU of this host, and fit its figures")
    fit.add_argument("out", type=Path, help="file to write, for --plan-gpu")
    fit.add_argument("--gpu", default="h200", metavar="NAME", help="the GPU's name in the table")
    compare = commands.add_parser("compare", help="compare predictions with measured runs")
    compare.add_argument("machine", help="a GPU of the planner's table, or a file of fit")
    compare.add_argument("runs", nargs="+", type=Path, help="files of tools/bench/vlm.py")
    return parser


def _run(options: argparse.Namespace, of_runs: dict[str, str]) -> None:
    from calibration import fit, validate
    from examples.mimo.nemotron_vlm.planner.machine import find_machine

    if options.command == "fit":
        fit.calibrate(options.out, options.gpu, of_runs)
        print(f"{options.out}: for --plan-gpu", file=sys.stderr)
    else:
        runs = [run for file in options.runs for run in validate.read(file)]
        print(validate.describe(validate.compare(find_machine(options.machine), runs)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
