# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The options that this program has beside Megatron's."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from examples.mimo.nemotron_vlm.encoder_schedule import BUBBLES, THREE_PHASES
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import COLOCATED, NON_COLOCATED
from examples.mimo.nemotron_vlm.presets import PRESETS
from megatron.training.argument_utils import ArgumentGroupFactory


@dataclass
class OwnOptions:
    """All others are Megatron's."""

    model: str = field(
        default="tiny",
        metadata={
            "argparse_meta": {
                "help": f"sizes, which options override: {', '.join(sorted(PRESETS))}, or the "
                "model.json of a converted checkpoint"
            }
        },
    )
    device: Literal["cpu", "cuda"] = "cpu"
    """where the ranks compute"""
    placement: Literal[COLOCATED, NON_COLOCATED] = COLOCATED
    """both modules on all ranks, or the encoder on the first, the language model on the others"""
    language: str = ""
    """AXIS=SIZE[,AXIS=SIZE…] with axes tp cp pp dp ep etp vpp; dp is derived when left out; short
    for --tensor-model-parallel-size and so on"""
    encoder: str = ""
    """layout of encoder and projector, in the same words: tp dp pp"""
    encoder_tp: int | None = None
    """the encoder's tensor-parallel size"""
    encoder_dp: int | None = None
    """the encoder's data-parallel size"""
    encoder_pp: int | None = None
    """the encoder's pipeline-parallel size, on ranks of its own"""
    recompute_encoder: int = 0
    """colocated, keep no encoder activations but run the encoder again in the backward, so many
    microbatches' worth at a time; 0 keeps them"""
    encoder_macro_batch: int | None = None
    """colocated without a pipeline or in its bubbles, encode the images of so many microbatches at
    once; by default 2 on GPUs, where a step has as many (in the bubbles, 4), and else 1"""
    encoder_schedule: Literal[THREE_PHASES, BUBBLES] | None = None
    """colocated with a pipeline, encode all images of a step before it and go back through the
    encoder after it, or both where its stages would wait; by default bubbles with --cuda-graph-impl
    local and 4 microbatches or more, where tp, cp and vpp are 1, and else three-phases"""
    freeze: str = ""
    """parts that are not trained, with commas between: encoder, projector, language"""
    encoder_lr: float | None = None
    """of the encoder, in place of --lr"""
    projector_lr: float | None = None
    """of the projector, in place of --lr"""
    encoder_weight_decay: float | None = None
    """of the encoder, in place of --weight-decay"""
    projector_weight_decay: float | None = None
    """of the projector, in place of --weight-decay"""
    data: str = "digits"
    """digits|digits:N|mock|energon:PATH: strips of one to three scanned digits, of N digits, noise,
    or shards"""
    pack: bool = False
    """as many samples in a row of --seq-length as fit; none sees another, and a batch's sizes count
    rows"""
    pack_window: int = 1024
    """neighbours in the stream of samples that are packed together"""
    sample_multiple: int = 16
    """packed, each sample is padded to a multiple of so many tokens, which 2·cp·tp must divide"""
    balance: bool = True
    """give rows to ranks and microbatches in the stream's order, not by what they cost"""
    max_tiles: int = 12
    """most tiles of an image, its thumbnail not counted"""
    thumbnail: bool = True
    """only the tiles themselves"""
    bad_samples: Literal["skip", "refuse"] = "skip"
    """what to do with a data set that has any"""
    prompt: str = "Describe the image."
    """question asked where a sample has only a caption"""
    image_token: str = "<image>"
    """the tokenizer's token for an image"""
    surveys: str | None = None
    """directory of surveys; beside the data by default"""
    metrics_out: Path | None = None
    """JSON lines, one per step"""
    report: Path | None = None
    """PNG of curves and readings at the end"""
    log_file: str | None = None
    """where Megatron's own output goes; log.txt beside --metrics-out by default, - is the
    terminal"""
    dry_run: int = field(
        default=0, metadata={"argparse_meta": {"nargs": "?", "const": 1, "metavar": "RANKS"}}
    )
    """count the parameters of the model, or of so many ranks in the layouts, predict their memory,
    and end"""
    plan: int = 0
    """print the fastest layouts of the model and the batch on so many GPUs, 8 a node, and end;
    tools/plan_layout.py of the repository can do more"""
    plan_gpu: str = "h200"
    """h100, h200, b200, or a file of tools/plan_layout.py calibrate"""


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Enter the options of this program, as Megatron does its own; errors are `UserError`s."""
    ArgumentGroupFactory(OwnOptions).build_group(parser, "Nemotron VLM")
    parser.error = _refuse


def _refuse(message: str):
    raise UserError(f"{message}; see --help")


def own_options(argv: list[str]) -> argparse.Namespace:
    """What of a command line is ours.

    Raises:
        UserError: for a value that is none.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_own_options(parser)
    return parser.parse_known_args(argv)[0]
