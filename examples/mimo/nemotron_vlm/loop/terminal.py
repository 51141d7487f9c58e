# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run says on the terminal where it stands as it begins and ends; progress is in metrics.py."""

import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from examples.mimo.common.standing import standing

RATES = ("lr", "min_lr", "encoder_lr", "projector_lr", "lr_decay_style", "lr_decay_iters")
RATES += ("lr_wsd_decay_iters", "lr_wsd_decay_style", "lr_warmup_iters", "lr_warmup_fraction")
RATES += ("lr_warmup_init", "train_iters", "weight_decay", "weight_decay_incr_style")
RATES += ("encoder_weight_decay", "projector_weight_decay")
"""Arguments that decide the learning rate and the weight decay of a step."""

OTHERS = {
    "another schedule of learning rates": RATES,
    "another optimizer": ("adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
    "another batch": ("global_batch_size", "step_batch_size_schedule", "seq_length"),
    "another precision": (
        *("bf16", "fp16", "fp8", "fp8_recipe", "fp8_parts", "use_precision_aware_optimizer"),
        *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    ),
    "other frozen parts": ("freeze",),
    "another loss or dropout": (
        *("hidden_dropout", "attention_dropout", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        "moe_router_load_balancing_type",
    ),
}
"""Arguments that a run may change when it goes on, and that decide what it learns."""

LAYOUT = ("placement", "encoder", "language")
"""Arguments that determine which rank holds which part of the model."""


def say(text: str, args: Namespace) -> None:
    """Tell a text from the first rank."""
    if args.rank == 0:
        tell(text)


def tell(text: str, is_shown: bool = True) -> None:
    """Print a text on the terminal and, if the run has one, in the log that its output goes to."""
    if is_shown:
        print(text, file=sys.stderr, flush=True)
    if sys.stdout is not sys.__stdout__:
        print(text, flush=True)


def beginning(args: Namespace, directory: str | None, saved: Namespace | None) -> str:
    """Say whether a run is new or goes on, from where, and what has changed since.

    Args:
        directory: the checkpoint that is loaded, if there is one.
    """
    if directory is None:
        return "a new run"
    path = Path(directory)
    if not goes_on(args, directory):
        return f"a new run, with the weights of {path}"
    step = path.name.removeprefix("iter_").lstrip("0")
    said = f"going on after step {step} of {args.train_iters}, from {path}"
    if layout := changes(args, saved, LAYOUT):
        said += f"\nanother layout: {layout}; random states begin anew"
    for what, names in OTHERS.items():
        changed = changes(args, saved, names)
        if changed and names is RATES and args.use_checkpoint_opt_param_scheduler:
            changed += "; the saved schedule is used, as --use-checkpoint-opt_param-scheduler asks"
        said += f"\n{what}: {changed}" if changed else ""
    return said


def goes_on(args: Namespace, directory: str) -> bool:
    """Return whether a run goes on from a checkpoint, and does not only take its weights.

    A run that starts from --pretrained-checkpoint begins its data anew, also where that lies inside
    --load, and so does one that starts from a converted checkpoint, which is of no step.
    """
    path = Path(directory)
    is_own = args.load and path.parent.resolve() == Path(args.load).resolve()
    return bool(is_own and path.name != "release" and not args.finetune)


def changes(args: Namespace, saved: Namespace | None, names: Sequence[str]) -> str:
    """Return which of the arguments differ from the saved ones, with both values."""
    pairs = [(name, getattr(saved, name, None), getattr(args, name, None)) for name in names]
    return ", ".join(f"{name} {old} → {new}" for name, old, new in pairs if old != new)


def ending(args: Namespace, records: Sequence[dict], log: Path | None) -> str:
    """Say how fast the steps were, how much the model has learned, and where the results lie.

    Args:
        records: of the last steps, in their order.
        log: the file of Megatron's output.
    """
    said = []
    if len(records) > 1:
        tokens, tflops = (
            statistics.median(record[name] for record in records[1:])
            for name in ("tokens_per_s", "tflops")
        )
        device = "GPU" if args.device == "cuda" else "rank"
        said.append(f"speed: {tokens:,.0f} tokens/s and {tflops:.3g} TFLOP/s a {device}")
    if args.save:
        counted = "samples" if args.train_samples else "iters"
        larger = f" with a larger --train-{counted} goes on"
        said.append(f"newest: {standing}".replace(" goes on", larger))
    places = {"metrics": args.metrics_out, "log": log, "TensorBoard": args.tensorboard_dir}
    said += [f"{name}: {Path(path).absolute()}" for name, path in places.items() if path]
    if records and "eval_accuracy" in records[-1]:
        said.append(f"held-out accuracy: {records[-1]['eval_accuracy']:.1%}")
    return "\n".join(said)
