# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The options that this program has beside Megatron's."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.mimo.nemotron_vlm.encoder_schedule import BUBBLES, THREE_PHASES
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.placement import COLOCATED, PLACEMENTS
from examples.mimo.nemotron_vlm.presets import PRESETS

PARTS = ("encoder", "projector", "language")
"""Of the model, as ``--freeze`` names them."""

PARTS_OF_IMAGES = PARTS[:2]
"""Those with a learning rate and weight decay of their own."""

SIZES = {
    "language": {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    },
    "encoder": {"tp": "encoder_tp", "dp": "encoder_dp", "pp": "encoder_pp"},
}
"""Options that give single sizes of a module's layout."""


class OwnParser(argparse.ArgumentParser):
    """Errors are `UserError`s, so that ranks report them once."""

    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Options of this program; all others are Megatron's."""
    add = parser.add_argument_group("Nemotron VLM").add_argument
    add(
        "--model",
        default="tiny",
        metavar="NAME|FILE",
        help=f"sizes, which options override: {', '.join(sorted(PRESETS))}, or the model.json of a "
        "converted checkpoint",
    )
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the ranks compute")
    add(
        "--placement",
        choices=PLACEMENTS,
        default=COLOCATED,
        help="both modules on all ranks, or the encoder on the first ranks and the language model "
        "on the others",
    )
    add(
        "--language",
        default="",
        metavar="LAYOUT",
        help="AXIS=SIZE[,AXIS=SIZE…] with axes tp cp pp dp ep etp vpp; dp is derived when left "
        "out; short for --tensor-model-parallel-size and so on",
    )
    add("--encoder", default="", metavar="LAYOUT", help="layout of encoder and projector")
    for axis, option in SIZES["encoder"].items():
        add(f"--{option.replace('_', '-')}", type=int, metavar=axis.upper(), help=f"its {axis}")
    add(
        "--recompute-encoder",
        type=int,
        default=0,
        metavar="K",
        help="colocated, keep no encoder activations but run the encoder again in the backward, "
        "K microbatches' worth at a time; 0 keeps them",
    )
    add(
        "--encoder-macro-batch",
        type=int,
        default=1,
        metavar="K",
        help="colocated without a pipeline, or with --encoder-schedule bubbles, encode the images "
        "of K microbatches at once; in three phases, all of a step are",
    )
    add(
        "--encoder-schedule",
        choices=[THREE_PHASES, BUBBLES],
        default=THREE_PHASES,
        help="colocated with a pipeline, encode all images of a step before it and go back "
        "through the encoder after it, or both where its stages would wait",
    )
    add(
        "--freeze",
        default="",
        metavar="PART[,PART]",
        help=f"parts that are not trained, of {', '.join(PARTS)}",
    )
    for part in PARTS_OF_IMAGES:
        add(f"--{part}-lr", type=float, metavar="LR", help=f"of the {part}, in place of --lr")
        add(f"--{part}-weight-decay", type=float, metavar="DECAY", help="its own, likewise")
    add(
        "--data",
        default="digits",
        metavar="digits|digits:N|mock|energon:PATH",
        help="samples: strips of one to three scanned digits, of N digits, noise, or shards",
    )
    add(
        "--pack",
        action="store_true",
        help="as many samples in a row of --seq-length as fit; none sees another, and a batch's "
        "sizes count rows",
    )
    add(
        "--pack-window",
        type=int,
        default=1024,
        metavar="SAMPLES",
        help="neighbours in the stream that are packed together",
    )
    add(
        "--sample-multiple",
        type=int,
        default=16,
        metavar="TOKENS",
        help="packed, each sample is padded to a multiple of it, which 2·cp·tp must divide",
    )
    add(
        "--no-balance",
        dest="balance",
        action="store_false",
        help="give rows to ranks and microbatches in the stream's order, not by what they cost",
    )
    add("--max-tiles", type=int, default=12, metavar="N", help="of an image, beside its thumbnail")
    add("--no-thumbnail", dest="thumbnail", action="store_false", help="only the tiles themselves")
    add(
        "--bad-samples",
        choices=["skip", "refuse"],
        default="skip",
        help="what to do with a data set that has any",
    )
    add("--prompt", default="Describe the image.", metavar="TEXT", help="asks for a caption")
    add("--image-token", default="<image>", metavar="TOKEN", help="of the tokenizer")
    add("--surveys", metavar="DIR", help="where surveys are; beside the data by default")
    add("--metrics-out", type=Path, metavar="FILE", help="JSON lines, one per step")
    add("--report", type=Path, metavar="PNG", help="picture of curves and readings at the end")
    add(
        "--log-file",
        metavar="FILE",
        help="where Megatron's own output goes; log.txt beside --metrics-out by default, - is the "
        "terminal",
    )
    add(
        "--dry-run",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="RANKS",
        help="count the parameters of the model, or of so many ranks in the layouts, predict their "
        "memory, and end",
    )
    add(
        "--plan",
        type=int,
        default=0,
        metavar="GPUS",
        help="print the fastest layouts of the model and the batch on so many GPUs, 8 a node, and "
        "end; tools/plan_layout.py of the repository can do more",
    )
    add(
        "--plan-gpu",
        default="h200",
        metavar="NAME|FILE",
        help="h100, h200, b200, or a file of tools/plan_layout.py calibrate",
    )


def own_options(argv: list[str]) -> argparse.Namespace:
    """What of a command line is ours.

    Raises:
        UserError: for a value that is none.
    """
    parser = OwnParser(add_help=False, allow_abbrev=False)
    add_own_options(parser)
    return parser.parse_known_args(argv)[0]
