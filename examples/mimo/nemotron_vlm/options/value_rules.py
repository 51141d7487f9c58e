# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rules for the values of options as they were asked for, whatever the layouts."""

import math
from typing import Any

from examples.mimo.common.layout import SIZES, option_of
from examples.mimo.common.rules import ON_ENGINE, Rule, has
from examples.mimo.nemotron_vlm.data.reading_options import media_violation

AT_LEAST_1 = """micro_batch_size global_batch_size seq_length encoder_macro_batch sample_multiple
    pack_window train_iters eval_interval save_interval log_interval max_tiles video_frames
    distributed_timeout_minutes hidden_size num_attention_heads num_query_groups kv_channels
    num_distributed_optimizer_instances eval_global_batch_size eval_micro_batch_size
    lr_decay_iters lr_decay_samples ddp_num_buckets log_memory_interval plan_gpus_per_node
    tensorboard_log_interval loss_scale_window hysteresis""".split()
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
    lora_alpha distributed_timeout_seconds_after_init decoupled_lr decoupled_min_lr clip_grad
    start_weight_decay end_weight_decay lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples
    manual_gc_interval exit_interval exit_duration_in_mins""".split()
LEAST = dict.fromkeys(AT_LEAST_1, 1) | dict.fromkeys([*AT_LEAST_0, *FRACTIONS], 0)
MOST = {"min_lr": "lr", "lr_warmup_init": "lr", "moe_router_topk": "num_experts"}
MOST |= {"decoupled_min_lr": "decoupled_lr", "start_weight_decay": "end_weight_decay"}
"""Options that must not be larger than another."""


def _out_of_range(run: Any) -> str | None:
    args = run.asked
    layers = (names for one, names in AT_LEAST_1_WITH.items() if one in args.hybrid_layer_pattern)
    for name, least in (LEAST | dict.fromkeys(" ".join(layers).split(), 1)).items():
        number = getattr(args, name)
        if number is not None and not number >= least:  # nor not a number
            return f"{option_of(name)} must be {least} or more"
    for name in FRACTIONS:
        if (getattr(args, name) or 0) >= 1:
            return f"{option_of(name)} must be below 1"
    for name, other in MOST.items():
        number, most = getattr(args, name), getattr(args, other)
        if None not in (number, most) and number > most:
            return f"{option_of(name)} {number} must be at most {option_of(other)} {most}"
    return None


def _of_schedule(run: Any) -> str | None:
    """Return what the learning rate's schedule lacks, which Megatron asserts without a word."""
    args = run.asked
    unit = "iters" if args.train_samples is None else "samples"
    whole = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}") or math.inf
    warmup, falls = getattr(args, f"lr_warmup_{unit}"), getattr(args, f"lr_wsd_decay_{unit}")
    if warmup >= whole:
        steps = "steps" if unit == "iters" else unit
        what = f"must be less than the {steps} in which the learning rate decays"
        return f"--lr-warmup-{unit} is not taken here: {warmup} {what}"
    if args.lr_decay_style != "WSD":
        return None
    if falls is None:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, at whose end the rate is least"
    if falls > whole:
        return f"--lr-wsd-decay-{unit} {falls} must be at most {whole}, the {unit} of all decay"
    return None


OF_VALUES = [
    Rule(
        "--plan N and --dry-run RANKS",
        lambda r: r.line.only_asks and sorted([r.args.dry_run > 0, r.args.plan > 0]) != [0, 1],
        "they take 1 or more, and not both together",
        example="--plan 4 --dry-run 4",
    ),
    Rule("", _out_of_range, example="--lr nan"),
    Rule("", lambda r: media_violation(r.asked, r.preset), example="--video-frames 3"),
    Rule(
        "--report without --metrics-out and --eval-iters",
        lambda r: r.args.report and not (r.args.metrics_out and r.asked.eval_iters),
        "it shows the metrics file and what the model reads",
        example="--report r.html --eval-iters 1",
    ),
    Rule(
        "--report",
        lambda r: r.args.report and r.args.report.suffix != ".html",
        "it is a page, whose name must end in .html",
        example="--report r.png --metrics-out m --eval-iters 1",
    ),
    Rule(
        "--wandb-project without --wandb-exp-name, or without --wandb-save-dir and --save",
        lambda r: (
            has(r, "--wandb-project")
            and not (has(r, "--wandb-exp-name") and (r.args.wandb_save_dir or r.args.save))
        ),
        "Megatron's writer needs them",
        example="--wandb-project a",
    ),
    Rule(
        "--save-retain-interval",
        lambda r: r.args.save and (r.args.save_retain_interval or 0) % r.asked.save_interval,
        "{save_retain_interval} must be a multiple of --save-interval {save_interval}",
        example="--save s --save-interval 300 --save-retain-interval 500",
    ),
    Rule(
        "--keep-best without --save and --eval-iters, or with an --eval-interval between saves",
        lambda r: (
            r.args.keep_best
            and not (
                r.args.save
                and r.asked.eval_iters
                and r.asked.eval_interval % r.asked.save_interval == 0
            )
        ),
        "it takes saves of evaluated steps: --save-interval {save_interval} must divide "
        "--eval-interval {eval_interval}",
        example="--keep-best eval_loss --save s --eval-iters 1 --eval-interval 3 --save-interval 2",
    ),
    Rule(
        "--sample-multiple with --pack",
        lambda r: r.asked.pack and r.asked.seq_length % r.asked.sample_multiple,
        "{sample_multiple} must divide --seq-length {seq_length}",
        example="--pack --seq-length 64 --sample-multiple 24",
    ),
    Rule(
        "--train-samples",
        lambda r: (
            r.asked.train_samples is not None and r.asked.train_samples < r.asked.global_batch_size
        ),
        "{train_samples} must be {global_batch_size} or more, the samples of a step",
        example="--train-samples 0",
    ),
    Rule(
        "--min-loss-scale",
        lambda r: r.args.fp16 and not 0 < r.asked.min_loss_scale <= r.asked.initial_loss_scale,
        "{min_loss_scale} must be above 0, and at most --initial-loss-scale {initial_loss_scale}",
        example="--fp16 --min-loss-scale 0",
    ),
    Rule("", _of_schedule, example="--train-iters 6 --lr-warmup-iters 6"),
    Rule(
        "--lora-dim",
        lambda r: r.args.device == "cuda" and r.args.lora_dim % 8,
        "{lora_dim} must be a multiple of 8 on GPUs, for grouped GEMMs",
        example=f"{ON_ENGINE} --lora-dim 4",
    ),
    Rule(
        "--num-attention-heads",
        lambda r: r.asked.num_attention_heads % r.asked.num_query_groups,
        "{num_attention_heads} must be a multiple of --num-query-groups {num_query_groups}",
        example="--num-attention-heads 7",
    ),
]
"""Rules in the order in which they are checked; numbers are in their range before others."""
