#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Show a layout without starting it: rank map, groups, bridge and the schedule's timeline.

tools/show_layout.py --encoder tp=2,dp=4 --language cp=2,pp=2,dp=2,ep=2 --world 8 --png layout.png

It takes the applied checkout on PYTHONPATH, or that in build/Megatron-LM.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKOUT = REPOSITORY / "build" / "Megatron-LM"


def main(argv: list[str]) -> int:
    """Show it; returns the exit status, 2 for what a user got wrong."""
    options = _parser().parse_args(argv)
    if problem := _prepare():
        return _fail(problem)
    from examples.mimo.nemotron_vlm.errors import UserError
    from layout_view.text import describe

    os.environ["WORLD_SIZE"] = str(options.world)  # which grids are held to
    try:
        view = _view(options)
        print(describe(view))
        _write(options, view)
    except (UserError, OSError) as error:
        return _fail(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    layout = "AXIS=SIZE[,AXIS=SIZE…]; dp is derived when left out"
    add("--encoder", default="", metavar="LAYOUT", help=layout)
    add("--language", default="", metavar="LAYOUT", help="the same")
    add("--world", type=_positive, required=True, metavar="RANKS", help="number of ranks")
    add(
        "--placement",
        choices=["colocated", "non-colocated"],
        default="colocated",
        help="both modules on all ranks, or the encoder on the first ranks and the language model "
        "on the others",
    )
    add("--gpus-per-node", type=_positive, default=8, metavar="N", help="ranks of a node")
    add("--model", default="tiny", metavar="NAME|FILE", help="sizes that the layouts must divide")
    add(
        "--seq-length", type=_positive, metavar="TOKENS", help="of a sample; the model's by default"
    )
    add(
        "--microbatches",
        type=_positive,
        metavar="M",
        help="of a step; two for each stage of the pipeline by default",
    )
    add(
        "--micro-batch-size",
        type=_positive,
        default=1,
        metavar="SAMPLES",
        help="of a microbatch, on each DP rank of the language model",
    )
    add(
        "--encoder-share",
        type=_share,
        default=0.3,
        metavar="E",
        help="part of a step without waiting that the encoder takes; 0.3 by default",
    )
    add("--png", type=Path, metavar="FILE", help="write a picture")
    add("--svg", type=Path, metavar="FILE", help="write a picture")
    add("--json", type=Path, metavar="FILE", help="write all ranks, groups, rows and times")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def _prepare() -> str | None:
    """Make the checkout importable; returns what is missing, in a line."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        sys.path.insert(0, str(CHECKOUT))
        sys.modules.pop("megatron", None)
        if not (CHECKOUT / "megatron" / "core" / "cpu_runtime").exists():
            return "no applied checkout of Megatron-LM: run make setup, or set PYTHONPATH to one"
    return None


def _view(options: argparse.Namespace):
    from examples.mimo.nemotron_vlm.errors import UserError
    from examples.mimo.nemotron_vlm.presets import find_preset
    from layout_view.modules import read_layouts
    from layout_view.view import View

    try:
        preset = find_preset(options.model)
    except ValueError as error:
        raise UserError(f"--model {options.model}: {error}") from error
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
    rows = preset.encoder.tokens_per_tile
    return View(layouts, options.gpus_per_node, rows, options.encoder_share)


def _write(options: argparse.Namespace, view) -> None:
    if options.png or options.svg:
        from layout_view.picture import draw

        for path, kind in ((options.png, "png"), (options.svg, "svg")):
            if path:
                draw(view, path, kind)
    if options.json:
        options.json.write_text(json.dumps(view.data()) + "\n")


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
