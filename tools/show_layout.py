#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Show a layout without starting it: rank map, groups, bridge and the schedule's timeline.

tools/show_layout.py --encoder tp=2,dp=4 --language cp=2,pp=2,dp=2,ep=2 --world 8 --png layout.png

It uses the applied checkout on PYTHONPATH, or that in build/Megatron-LM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from command_line import Parser, positive, share
from in_checkout import run


def main(argv: list[str]) -> int:
    """Show a layout; return the exit status, 2 for user errors."""
    options = _parser().parse_args(argv)
    return run(lambda: _show(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    layout = "AXIS=SIZE[,AXIS=SIZE…]; dp is derived when left out"
    add("--encoder", default="", metavar="LAYOUT", help=layout)
    add("--language", default="", metavar="LAYOUT", help="the same")
    add("--world", type=positive, required=True, metavar="RANKS", help="number of ranks")
    add(
        "--placement",
        choices=["colocated", "non-colocated"],
        default="colocated",
        help="both modules on all ranks, or the encoder on the first ranks and the language model "
        "on the others",
    )
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="ranks of a node")
    add("--model", default="tiny", metavar="NAME|FILE", help="sizes that the layouts must divide")
    add("--seq-length", type=positive, metavar="TOKENS", help="of a sample; the model's by default")
    add(
        "--microbatches",
        type=positive,
        metavar="M",
        help="of a step; two for each stage of the pipeline by default",
    )
    add(
        "--micro-batch-size",
        type=positive,
        default=1,
        metavar="SAMPLES",
        help="of a microbatch, on each DP rank of the language model",
    )
    add(
        "--encoder-share",
        type=share,
        default=0.3,
        metavar="E",
        help="part of a step without waiting that the encoder takes; 0.3 by default",
    )
    add(
        "--encoder-schedule",
        choices=["three-phases", "bubbles"],
        default="three-phases",
        help="where colocated modules with a pipeline encode, as in training",
    )
    add(
        "--encoder-macro-batch",
        type=positive,
        default=1,
        metavar="K",
        help="microbatches that are encoded at once in the bubbles",
    )
    add("--png", type=Path, metavar="FILE", help="write a picture")
    add("--svg", type=Path, metavar="FILE", help="write a picture")
    add("--json", type=Path, metavar="FILE", help="write all ranks, groups, rows and times")
    parser.set_defaults(overlap_p2p_comm=True)  # as in training, whose rules read it
    return parser


def _show(options: argparse.Namespace) -> None:
    from examples.mimo.nemotron_vlm.loop.encoder_schedule import (
        BUBBLES,
        check_bubbles,
        check_encoder_schedule,
    )
    from examples.mimo.nemotron_vlm.model.presets import find_preset
    from layout_view.modules import read_layouts
    from layout_view.text import describe
    from layout_view.view import View

    os.environ["WORLD_SIZE"] = str(options.world)  # HyperCommGrid checks its size against it
    preset = find_preset(options.model)
    layouts = read_layouts(
        options.encoder,
        options.language,
        options.world,
        preset,
        options.placement,
        options.microbatches,
        options.micro_batch_size,
        options.seq_length,
    )
    check_encoder_schedule(options, layouts.language)
    check_bubbles(options, layouts)
    rows, in_bubbles = preset.encoder.tokens_per_tile, options.encoder_schedule == BUBBLES
    how = options.encoder_share, in_bubbles, options.encoder_macro_batch
    view = View(layouts, options.gpus_per_node, rows, *how)
    print(describe(view))
    _write(options, view)


def _write(options: argparse.Namespace, view) -> None:
    if options.png or options.svg:
        from layout_view.picture import draw

        for path, kind in ((options.png, "png"), (options.svg, "svg")):
            if path:
                draw(view, path, kind)
    if options.json:
        options.json.write_text(json.dumps(view.data()) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
