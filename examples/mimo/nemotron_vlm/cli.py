# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Command line of the training program; most bad input ends here, before torch is imported."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import Batch, Layouts, parse_layout
from examples.mimo.nemotron_vlm.layout_rules import resolve
from examples.mimo.nemotron_vlm.placement import COLOCATED, NON_COLOCATED, PLACEMENTS
from examples.mimo.nemotron_vlm.presets import PRESETS, VLMPreset
from examples.mimo.nemotron_vlm.recurrent_cp import RecurrentCP

PARTS = ("encoder", "projector", "language")
"""Of the model, as ``--freeze`` names them."""


@dataclass(frozen=True)
class RunConfig:
    """A run, as asked for on the command line."""

    preset: VLMPreset
    layouts: Layouts
    device: str
    transformer_impl: str
    precision: str
    data: str
    seed: int
    steps: int
    lr: float
    min_lr: float
    warmup_steps: int
    weight_decay: float
    clip_grad: float
    adam_eps: float
    recompute_encoder: int
    freeze: tuple[str, ...]
    eval_interval: int
    eval_samples: int
    save: Path | None
    load: Path | None
    restart_from_latest: bool
    async_save: bool
    save_interval: int
    max_skipped_steps: int
    fault_timeout: float
    metrics_out: Path | None
    report: Path | None
    dry_run: bool


class _Parser(argparse.ArgumentParser):
    """Errors are `UserError`s, so that ranks report them once."""

    def error(self, message: str):
        raise UserError(f"{message}; see --help")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", ()):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_nemotron_vlm.py",
        description="Train a Nemotron VLM whose encoder and language model have layouts of their "
        "own. A layout is AXIS=SIZE[,AXIS=SIZE…] with axes tp cp pp dp ep etp vpp; dp is derived "
        "when left out.",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", choices=sorted(PRESETS), default="tiny", help="model size")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the ranks compute")
    add(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        default="local",
        help="layers: Megatron's own, or Transformer Engine's (GPU only)",
    )
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of parameters")
    add(
        "--placement",
        choices=PLACEMENTS,
        default=COLOCATED,
        help="both modules on all ranks, or the encoder on the first ranks and the language model "
        "on the others",
    )
    add("--encoder", default="", metavar="LAYOUT", help="layout of encoder and projector")
    add("--language", default="", metavar="LAYOUT", help="layout of the language model")
    add(
        "--cp-linear",
        choices=["state-passing", "head-parallel"],
        default="state-passing",
        help="context parallelism of Mamba-2 and gated delta net layers: states pass between "
        "ranks, any cp; or heads are spread, which must divide",
    )
    add(
        "--token-layout",
        choices=["contiguous", "zigzag"],
        help="where tokens lie under cp: contiguous except around attention (the default, with "
        "state passing), or zigzag except around recurrent layers",
    )
    add("--global-batch-size", type=int, default=32, help="samples per step")
    add(
        "--micro-batch-size",
        type=int,
        default=4,
        help="samples per microbatch on each DP rank of the language model",
    )
    add("--seq-length", type=int, default=32, help="tokens per sample, padded")
    add("--steps", type=int, default=20, help="optimizer steps of the whole run")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--min-lr", type=float, default=0.0, help="learning rate at the end")
    add("--warmup-steps", type=int, default=0, help="steps of linear warm-up; cosine decay follows")
    add("--weight-decay", type=float, default=0.01, help="AdamW's weight decay")
    add("--clip-grad", type=float, default=1.0, help="largest global gradient norm; 0: no clipping")
    add("--adam-eps", type=float, default=1e-5, help="Adam's epsilon")
    add(
        "--recompute-encoder",
        type=int,
        default=0,
        metavar="K",
        help="with a pipeline, keep no encoder activations but run the encoder again in the "
        "backward, K microbatches' worth at a time; 0 keeps them",
    )
    add(
        "--freeze",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=(),
        metavar="PART[,PART]",
        help=f"parts that are not trained, of {', '.join(PARTS)}",
    )
    add("--seed", type=int, default=0, help="of initial weights and samples")
    add("--data", default="digits", metavar="digits|mock", help="training data")
    add(
        "--eval-interval",
        type=int,
        default=0,
        metavar="K",
        help="evaluate every K steps and after the last; 0: never",
    )
    add("--eval-samples", type=int, default=256, help="held-out samples an evaluation reads")
    add("--save", type=Path, metavar="DIR", help="directory for checkpoints")
    add("--load", type=Path, metavar="DIR", help="resume from the newest checkpoint there")
    add(
        "--save-interval",
        type=int,
        default=0,
        metavar="K",
        help="save every K steps; 0: after the last only",
    )
    add(
        "--async-save",
        action="store_true",
        help="write checkpoints in the background, while training goes on",
    )
    add(
        "--restart-from-latest",
        action="store_true",
        help="resume from the newest whole checkpoint in --save, if there is one; with torchrun's "
        "--max-restarts a run that lost a rank resumes by itself",
    )
    add(
        "--max-skipped-steps",
        type=int,
        default=10,
        metavar="K",
        help="end the run after more than K steps in a row with gradients that are not finite",
    )
    add(
        "--fault-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="end the run when a rank is at one microbatch for so long (twice as long at writing a "
        "checkpoint, 3 times at building and loading, 20 times in the first step and evaluation on "
        "GPUs, which compile kernels), or shows no sign of life for half of it",
    )
    add("--metrics-out", type=Path, metavar="FILE", help="JSON lines, one per step")
    add("--report", type=Path, metavar="PNG", help="picture of curves and readings at the end")
    add("--dry-run", action="store_true", help="build on the meta device, print parameter counts")
    return parser


def parse_args(argv: list[str], world_size: int) -> RunConfig:
    """Read and check the command line.

    Raises:
        UserError: for what the command line alone shows not to work, naming the fact and the fix.
    """
    args = _parser().parse_args(argv)
    _check_numbers(args)
    if args.device == "cpu" and args.transformer_impl == "transformer_engine":
        raise UserError("--transformer-impl transformer_engine needs --device cuda")
    preset = PRESETS[args.model]()
    encoder = parse_layout(args.encoder, "encoder")
    language = parse_layout(args.language, "language")
    if args.recompute_encoder and (args.placement == NON_COLOCATED or language.pp == 1):
        raise UserError(
            f"--recompute-encoder needs --placement {COLOCATED}, and a language model with pp of 2 "
            "or more"
        )
    if args.dry_run and world_size > 1:
        raise UserError(f"--dry-run counts the whole model: start it on 1 rank, not {world_size}")
    return RunConfig(
        preset=preset,
        layouts=resolve(
            encoder,
            language,
            Batch(args.global_batch_size, args.micro_batch_size, args.seq_length),
            world_size,
            preset,
            args.placement,
            _recurrent_cp(args),
        ),
        **{
            name: getattr(args, name)
            for name in RunConfig.__dataclass_fields__
            if name not in ("preset", "layouts")
        },
    )


def _recurrent_cp(args: argparse.Namespace) -> RecurrentCP:
    is_passing = args.cp_linear == "state-passing"
    if args.token_layout == "contiguous" and not is_passing:
        raise UserError(
            "--token-layout contiguous needs --cp-linear state-passing: heads are spread from "
            "zigzag tokens"
        )
    default = "contiguous" if is_passing else "zigzag"
    return RecurrentCP(args.cp_linear, args.token_layout or default)


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("global_batch_size", "micro_batch_size", "seq_length", "steps", "eval_samples"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more")
    for name in ("lr", "min_lr", "weight_decay", "clip_grad", "adam_eps", "fault_timeout"):
        if not math.isfinite(getattr(args, name)) or getattr(args, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} must be a finite number, 0 or more")
    if args.adam_eps == 0:
        raise UserError("--adam-eps must be above 0")
    for name in ("eval_interval", "save_interval", "warmup_steps", "seed", "recompute_encoder"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} must be 0 or more")
    if unknown := [part for part in args.freeze if part not in PARTS]:
        raise UserError(f"--freeze {unknown[0]}: no such part; choose from {', '.join(PARTS)}")
    if set(args.freeze) == set(PARTS):
        raise UserError("--freeze leaves nothing to train; leave out one of its parts")
    if not 0 <= args.min_lr <= args.lr:
        raise UserError(f"--min-lr {args.min_lr} must lie between 0 and --lr {args.lr}")
    if args.warmup_steps >= args.steps:
        raise UserError(f"--warmup-steps {args.warmup_steps} must be below --steps {args.steps}")
    if args.save_interval and not args.save:
        raise UserError("--save-interval needs --save DIR")
    if args.restart_from_latest and (args.load or not args.save):
        raise UserError("--restart-from-latest needs --save DIR, and takes the place of --load")
    if args.async_save and not args.save:
        raise UserError("--async-save needs --save DIR")
    if args.max_skipped_steps < 0:
        raise UserError("--max-skipped-steps must be 0 or more")
    if args.fault_timeout < 4:
        raise UserError("--fault-timeout must be 4 seconds or more")
    if args.report and not args.metrics_out:
        raise UserError("--report draws the metrics file: add --metrics-out FILE")
