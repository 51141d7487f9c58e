#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan the layouts of a training run, or measure a machine.

tools/plan_layout.py --model nano-vl-30b-a3b --gpus 64 --gpu h200 --global-batch-size 256
tools/plan_layout.py calibrate --out cpu.json

It uses the applied checkout on PYTHONPATH, or that in build/Megatron-LM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from command_line import Parser, positive
from in_checkout import run


def main(argv: list[str]) -> int:
    """Run the command; return the exit status, 2 for user errors."""
    options = _read(argv)
    os.environ["WORLD_SIZE"] = str(getattr(options, "gpus", 1))  # which HyperCommGrid checks
    if options.run is not _calibrate:
        # Nothing is compiled, and PyTorch's compiler is slow to import.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return run(lambda: options.run(options))


def _read(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; ``run`` of the result is the function to call with it."""
    parser = Parser(
        description="Plan the layouts of a training run; 'calibrate' measures a machine, and has a "
        "--help of its own."
    )
    if argv[:1] == ["calibrate"]:
        _calibrate_options(parser)
        return parser.parse_args(argv[1:])
    _plan_options(parser)
    return parser.parse_args(argv)


def _plan_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="nano-vl-30b-a3b", metavar="NAME|FILE", help="a preset or model.json")
    add("--gpus", type=positive, required=True, metavar="N", help="of the whole run")
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="that NVLink connects")
    add("--gpu", default="h200", metavar="NAME|FILE", help="h100, h200, b200, or of calibrate")
    add("--seq-length", type=positive, metavar="TOKENS", help="the model's by default")
    add("--global-batch-size", type=positive, required=True, metavar="SAMPLES", help="of a step")
    add(
        "--tiles",
        type=_chances,
        default={12: 1.0},
        metavar="N[:CHANCE],…",
        help="image tiles of a sample, e.g. 1:0.3,7:0.5,13:0.2; 12 by default",
    )
    add(
        "--expert-imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="tokens of the busiest experts' rank over the mean; 1 is perfect balance",
    )
    add("--placement", choices=["colocated", "non-colocated"], help="only this one")
    add(
        "--encoder-schedule",
        choices=["three-phases", "bubbles"],
        default="three-phases",
        help="of colocated plans with a pipeline",
    )
    add("--json", type=Path, metavar="FILE", help="write the plans")
    add("--png", type=Path, metavar="FILE", help="draw the best plan's timeline")
    parser.set_defaults(run=_plan)


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="for --gpu of a plan")
    add("--model", metavar="NAME|FILE", help="whose layers; tiny, with cuda nano-vl-30b-a3b")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="what to measure")
    add("--gpu", default="h200", metavar="NAME", help="with cuda: whose peaks hold")
    parser.set_defaults(run=_calibrate)


def _chances(text: str) -> dict[int, float]:
    chances = {}
    for part in text.split(","):
        count, _, chance = part.partition(":")
        try:
            chances[int(count)] = float(chance or 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part} is not N or N:CHANCE") from None
    if min(chances) < 0 or min(chances.values()) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: tiles of 0 or more, chances above 0")
    return chances


def _plan(options: argparse.Namespace) -> None:
    from examples.mimo.common.layout import PLACEMENTS
    from examples.mimo.nemotron_vlm.loop.encoder_schedule import BUBBLES
    from examples.mimo.nemotron_vlm.model.presets import find_preset
    from examples.mimo.nemotron_vlm.planner.machine import find_machine
    from examples.mimo.nemotron_vlm.planner.plan import Tiles
    from examples.mimo.nemotron_vlm.planner.report import describe, rows_of
    from examples.mimo.nemotron_vlm.planner.search import Task, plans_of

    preset, machine = find_preset(options.model), find_machine(options.gpu)
    task = Task(
        preset=preset,
        world=options.gpus,
        gpus_per_node=options.gpus_per_node,
        seq_length=options.seq_length or preset.seq_length,
        global_batch=options.global_batch_size,
        images=Tiles.of(options.tiles),
        imbalance=options.expert_imbalance,
        placements=(options.placement,) if options.placement else PLACEMENTS,
        in_bubbles=options.encoder_schedule == BUBBLES,
    )
    found = plans_of(task, machine)
    print(describe(task, machine, found, options.model))
    if options.json:
        options.json.write_text(json.dumps(rows_of(task, found, options.model), indent=2) + "\n")
    if options.png:
        _draw(found.best[0], options.png)


def _draw(priced, path: Path) -> None:
    """Draw the timeline of a plan's step."""
    from bench.timeline import draw

    plan, step = priced.plan, priced.step
    title = (
        f"{plan.layouts.placement}: encoder {plan.layouts.encoder}, language "
        f"{plan.layouts.language}; {step.seconds:.3f} s, without gradients and optimizer"
    )
    draw(path, {title: step.spans}, step.stages)


def _calibrate(options: argparse.Namespace) -> None:
    from calibration.calibrate import calibrate

    model = options.model or {"cpu": "tiny", "cuda": "nano-vl-30b-a3b"}[options.device]
    calibrate(model, options.device, options.gpu, options.out)
    print(f"{options.out}: for --gpu", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
