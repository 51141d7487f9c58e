#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Show a layout without starting it: rank map, groups, bridge and the schedule's timeline.

tools/show_layout.py --encoder tp=2,dp=4 --language cp=2,pp=2,dp=2,ep=2 --world 8 --png layout.png

It uses the applied checkout on PYTHONPATH, or that in build/Megatron-LM.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from command_line import Parser, positive
from in_checkout import run


def main(argv: list[str]) -> int:
    """Show a layout; return the exit status, 2 for user errors."""
    options = _parser().parse_args(argv)
    return run(lambda: _show(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    layout = "AXIS=SIZE[,AXIS=SIZE…]; dp is derived when left out"
    number = {"type": positive, "metavar": "N"}
    add("--encoder", default="", metavar="LAYOUT", help=layout)
    add("--language", default="", metavar="LAYOUT", help="the same")
    add("--world", required=True, help="number of ranks", **number)
    where = (
        "both modules on all ranks, or the encoder on the first and the language model on the rest"
    )
    choices = ["colocated", "non-colocated"]
    add("--placement", choices=choices, default="colocated", help=where)
    add("--gpus-per-node", default=8, help="ranks of a node", **number)
    add("--model", default="tiny", metavar="NAME|FILE", help="sizes that the layouts must divide")
    add("--seq-length", help="tokens of a sample; the model's by default", **number)
    microbatches = "of a step; two for each stage of the pipeline by default"
    add("--microbatches", help=microbatches, **number)
    samples = "samples of a microbatch, on each DP rank of the language model"
    add("--micro-batch-size", default=1, help=samples, **number)
    add("--tiles", default=1, help="image tiles of a sample", **number)
    gpu = "GPU of the timeline's seconds, as predicted: h100, h200, b200, or a calibrated file"
    add("--gpu", default="h200", metavar="NAME|FILE", help=gpu)
    again = "layers of the language model that run again"
    add("--recompute", choices=["none", "moe", "full"], default="none", help=again)
    schedule = "where colocated modules with a pipeline encode, as in training"
    choices = ["three-phases", "bubbles"]
    add("--encoder-schedule", choices=choices, default="three-phases", help=schedule)
    at_once = "microbatches that are encoded at once, in the bubbles or without a pipeline"
    add("--encoder-macro-batch", default=1, help=at_once, **number)
    add("--png", type=Path, metavar="FILE", help="write a picture; other endings do too, as .svg")
    # as in training, whose rules read them
    parser.set_defaults(overlap_p2p_comm=True, recompute_encoder=0)
    return parser


def _show(options: argparse.Namespace) -> None:
    os.environ["WORLD_SIZE"] = str(options.world)  # HyperCommGrid checks its size against it
    view = view_of(options)
    from layout_view.text import describe

    print(describe(view))
    if options.png:
        from layout_view.picture import draw

        draw(view, options.png)


def view_of(options: argparse.Namespace):
    """Check the layouts as the training program does, and return what is shown of them.

    Raises:
        UserError: a rule is broken; the message names the numbers, the rule, and the nearest
            layouts that would work.
    """
    from examples.mimo.common.errors import UserError
    from examples.mimo.common.layout import Batch, parse_layout
    from examples.mimo.nemotron_vlm.loop.encoder_schedule import (
        check_encoder_schedule,
        schedule_of,
    )
    from examples.mimo.nemotron_vlm.model.presets import find_preset
    from examples.mimo.nemotron_vlm.options.layout_rules import ranks_of_modules, resolve
    from examples.mimo.nemotron_vlm.planner.machine import find_machine
    from examples.mimo.nemotron_vlm.planner.plan import Plan, Tiles
    from layout_view.view import View

    preset, tiles = find_preset(options.model), Tiles(options.tiles)
    if len(preset.encoders) > 1:
        names = " and ".join(preset.names)
        raise UserError(f"--model {options.model}: models of one encoder are shown, not of {names}")
    asked = (
        parse_layout(options.encoder, "encoder"),
        parse_layout(options.language, "language"),
    )
    *_, ranks = ranks_of_modules(asked[:1], asked[1], options.world, options.placement)
    wanted, micro_size = asked[1], options.micro_batch_size
    dp = wanted.dp or max(1, ranks // (wanted.tp * wanted.cp * wanted.pp))
    samples = (options.microbatches or 2 * wanted.pp) * micro_size * dp
    batch = Batch(samples, micro_size, options.seq_length or preset.seq_length)
    layouts = resolve(asked[:1], asked[1], batch, options.world, preset, options.placement)
    check_encoder_schedule(options, layouts)
    tiles.check(preset, batch.seq_length)
    machine = replace(find_machine(options.gpu), gpus_per_node=options.gpus_per_node)
    plan = Plan(preset, layouts, tiles, options.recompute, schedule_of(options))
    return View(plan, machine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
