# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rules for the values of options, whatever the layouts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.mimo.common.layout import SIZES, option_of
from examples.mimo.common.rules import Rule
from examples.mimo.nemotron_vlm.data.reading_options import media_violation

AT_LEAST_1 = """micro_batch_size global_batch_size seq_length encoder_macro_batch sample_multiple
    pack_window train_iters eval_interval save_interval log_interval max_tiles video_frames
    distributed_timeout_minutes hidden_size num_attention_heads num_query_groups kv_channels
    num_distributed_optimizer_instances eval_global_batch_size eval_micro_batch_size
    lr_decay_iters ddp_num_buckets log_memory_interval plan_gpus_per_node""".split()
AT_LEAST_1 += [name for names in SIZES.values() for name in names.values()]
AT_LEAST_1_WITH = {
    "E": "moe_ffn_hidden_size moe_router_topk",
    "M": "mamba_state_dim mamba_head_dim mamba_num_groups",
    "G": "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads",
}
"""Sizes of layers, which do not matter where the pattern has none of them."""
FRACTIONS = """hidden_dropout attention_dropout adam_beta1 adam_beta2 lr_warmup_fraction
    lora_dropout""".split()
"""Options that must be below 1."""
AT_LEAST_0 = """num_workers eval_iters lr_warmup_iters recompute_encoder seed lr min_lr
    lr_warmup_init weight_decay adam_eps init_method_std loss_scale ffn_hidden_size lora_dim
    lora_alpha distributed_timeout_seconds_after_init""".split()
LEAST = dict.fromkeys(AT_LEAST_1, 1) | dict.fromkeys([*AT_LEAST_0, *FRACTIONS], 0)
MOST = {"min_lr": "lr", "lr_warmup_init": "lr", "moe_router_topk": "num_experts"}
"""Options that must not be larger than another."""
PICTURES = ".png", ".pdf", ".svg"
"""Ends of the names of a report."""


def saves_into(args: Any, folder: str | None) -> bool:
    """Return whether a folder is the one in which the run saves its checkpoints."""
    return bool(folder and args.save) and Path(folder).resolve() == Path(args.save).resolve()


def _number_violations(run: Any) -> Iterator[str]:
    """Yield the options with numbers out of range."""
    args = run.asked
    layers = (names for one, names in AT_LEAST_1_WITH.items() if one in args.hybrid_layer_pattern)
    for name, least in (LEAST | dict.fromkeys(" ".join(layers).split(), 1)).items():
        number = getattr(args, name)
        if number is not None and not number >= least:  # nor not a number
            yield f"{option_of(name)} must be {least} or more"
    for name in FRACTIONS:
        if (getattr(args, name) or 0) >= 1:
            yield f"{option_of(name)} must be below 1"
    for name, other in MOST.items():
        number, most = getattr(args, name), getattr(args, other)
        if None not in (number, most) and number > most:
            yield f"{option_of(name)} {number} must be at most {option_of(other)} {most}"
    if args.device == "cuda" and args.lora_dim % 8:
        yield f"--lora-dim {args.lora_dim} must be a multiple of 8 on GPUs, for grouped GEMMs"
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads % groups:
        yield f"--num-attention-heads {heads} must be a multiple of --num-query-groups {groups}"


def _retain_violation(run: Any) -> str | None:
    every, kept = run.asked.save_interval, run.asked.save_retain_interval
    if not (run.asked.save and every and kept and kept % every):
        return None
    return (
        f"--save-retain-interval {kept} must be a multiple of --save-interval {every}; "
        f"nearest: {max(1, round(kept / every)) * every}"
    )


def _best_violation(run: Any) -> str | None:
    args = run.asked
    if not args.keep_best or not args.eval_interval % args.save_interval:
        return None
    return (
        f"--keep-best {args.keep_best} takes saves of evaluated steps: --save-interval "
        f"{args.save_interval} must divide --eval-interval {args.eval_interval}"
    )


def _sample_violation(run: Any) -> str | None:
    args = run.asked
    if args.train_samples is None or args.train_samples >= args.global_batch_size:
        return None
    return (
        f"--train-samples {args.train_samples} must be {args.global_batch_size} or more, "
        "the samples of a step"
    )


def _warmup_violation(run: Any) -> str | None:
    steps = run.asked.lr_decay_iters or run.asked.train_iters
    if steps and run.asked.lr_warmup_iters >= steps:
        return f"--lr-warmup-iters {run.asked.lr_warmup_iters} must be less than {steps} steps"
    return None


def _asking_violation(run: Any) -> str | None:
    numbers = run.asked.dry_run, run.asked.plan
    if not run.line.only_asks or (min(numbers) == 0 and max(numbers) > 0):
        return None
    return "--plan N and --dry-run RANKS take 1 or more, and not both together"


def _needs(title: str, is_broken, text: str, example: str) -> Rule:
    """Refuse options that lack others; the text is the whole refusal."""
    return Rule(title, lambda r: text if is_broken(r.asked) else None, example=example)


OF_VALUES = [
    Rule("--plan", _asking_violation, example="--plan 4 --dry-run 4"),
    Rule(
        "--dynamic-resolution",
        lambda r: media_violation(r.asked, r.preset),
        example="--model tiny --video-frames 3",
    ),
    _needs(
        "--report",
        lambda a: a.report and not (a.metrics_out and a.eval_iters),
        "--report draws the metrics file and what the model reads: add --metrics-out FILE and "
        "--eval-iters N",
        "--report r.png --eval-iters 1",
    ),
    _needs(
        "--wandb-project",
        lambda a: a.wandb_project and not (a.wandb_exp_name and (a.save or a.wandb_save_dir)),
        "--wandb-project needs --wandb-exp-name NAME, and --wandb-save-dir DIR or --save DIR",
        "--wandb-project a",
    ),
    Rule(
        "--save-retain-interval",
        _retain_violation,
        example="--save s --save-interval 300 --save-retain-interval 500",
    ),
    _needs(
        "--keep-best",
        lambda a: a.keep_best and not (a.save and a.eval_iters),
        "--keep-best needs --save DIR and --eval-iters N",
        "--keep-best eval_loss --save s",
    ),
    Rule("numbers", lambda r: next(_number_violations(r), None), example="--lr nan"),
    Rule(
        "--keep-best",
        _best_violation,
        example="--keep-best eval_loss --save s --eval-iters 1 --eval-interval 3 --save-interval 2",
    ),
    Rule(
        "--report",
        lambda r: (
            r.asked.report
            and r.asked.report.suffix not in PICTURES
            and f"--report {r.asked.report}: its name must end in {' or '.join(PICTURES)}"
        ),
        example="--report r.jpg --metrics-out m --eval-iters 1",
    ),
    _needs(
        "--pack",
        lambda a: a.pack and a.micro_batch_size != 1,
        "--pack makes one row a microbatch: --micro-batch-size must be 1",
        "--pack --micro-batch-size 2",
    ),
    Rule(
        "--sample-multiple",
        lambda r: (
            r.asked.pack
            and r.asked.seq_length % r.asked.sample_multiple
            and f"--sample-multiple {r.asked.sample_multiple} must divide --seq-length "
            f"{r.asked.seq_length}"
        ),
        example="--pack --seq-length 64 --sample-multiple 24",
    ),
    Rule("--train-samples", _sample_violation, example="--train-samples 10"),
    Rule("--lr-warmup-iters", _warmup_violation, example="--train-iters 6 --lr-warmup-iters 6"),
]
"""Rules in the order in which they are checked; they look at the options as they were asked for."""
