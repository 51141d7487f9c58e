#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Show a layout without starting it: rank map, groups, bridge and the schedule's timeline.

tools/show_layout.py --encoder tp=2,dp=4 --language cp=2,pp=2,dp=2,ep=2 --world 8 --png layout.png

It uses the applied checkout on PYTHONPATH, or that in build/Megatron-LM.
"""

import argparse
import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from command_line import Parser, positive
from in_checkout import run


def main(argv: list[str]) -> int:
    """Show a layout; return the exit status, 2 for user errors."""
    options, program = _parser().parse_known_args(argv)
    return run(lambda: _show(options, program))


def _parser() -> argparse.ArgumentParser:
    others = "Other options are the training program's, as --encoder, --language, --placement, "
    others += "--model, --encoder-schedule, --recompute-granularity; and --plan-gpu, "
    others += "--plan-gpus-per-node, --plan-tiles: by default, a sample has one tile."
    parser = Parser(description=__doc__.splitlines()[0], epilog=others, allow_abbrev=False)
    add = parser.add_argument
    number = {"type": positive, "metavar": "N"}
    add("--world", required=True, help="number of ranks", **number)
    microbatches = "microbatches of a step; two for each stage of the pipeline by default"
    add("--microbatches", help=microbatches, **number)
    samples = "samples of a microbatch, on each DP rank of the language model"
    add("--micro-batch-size", default=1, help=samples, **number)
    add("--png", type=Path, metavar="FILE", help="write a picture; other endings do too, as .svg")
    return parser


def _show(options: argparse.Namespace, program: list[str]) -> None:
    os.environ["WORLD_SIZE"] = str(options.world)  # HyperCommGrid checks its size against it
    view = view_of(options, program)
    from layout_view.text import describe

    print(describe(view))
    if options.png:
        from layout_view.picture import draw

        draw(view, options.png)


def view_of(options: argparse.Namespace, program: list[str]):
    """Check the training program's options as it does, and return what is shown of them.

    Raises:
        UserError: a rule is broken; the message names the numbers, the rule, and the nearest
            layouts that would work.
    """
    from examples.mimo.common.errors import UserError
    from examples.mimo.common.layout import parse_layout
    from examples.mimo.nemotron_vlm.loop.dry_run import machine_of
    from examples.mimo.nemotron_vlm.model.presets import find_preset
    from examples.mimo.nemotron_vlm.options.arguments import parse
    from examples.mimo.nemotron_vlm.options.layout_rules import ranks_of_modules
    from examples.mimo.nemotron_vlm.options.own_options import own_options
    from examples.mimo.nemotron_vlm.planner.inputs import Inputs, check
    from examples.mimo.nemotron_vlm.planner.plan import plan_of
    from layout_view.view import View

    own = own_options(program)
    inputs = (Inputs.parse(own.plan_tiles or "1"),)
    if len(names := find_preset(own.model).names) > 1:
        names = " and ".join(names)
        raise UserError(f"--model {own.model}: models of one encoder are shown, not of {names}")
    encoder = parse_layout(",".join(own.encoder or ()), "encoder")
    language = parse_layout(own.language, "language")
    *_, ranks = ranks_of_modules([encoder], language, options.world, own.placement)
    dp = language.dp or max(1, ranks // (language.tp * language.cp * language.pp))
    samples = (options.microbatches or 2 * language.pp) * options.micro_batch_size * dp
    batch = ["--global-batch-size", samples, "--micro-batch-size", options.micro_batch_size]
    with redirect_stdout(None):  # Megatron prints its arguments
        plan = plan_of(parse([*program, *map(str, batch)], options.world))
    check(plan.preset, inputs, plan.layouts.batch.seq_length)
    return View(replace(plan, inputs=inputs), machine_of(own))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
