# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rules for the values of options, whatever the layouts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.mimo.common.layout import SIZES, option_of
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


def saves_into(args: Any, folder: str | None) -> bool:
    """Return whether a folder is the one in which the run saves its checkpoints."""
    return bool(folder and args.save) and Path(folder).resolve() == Path(args.save).resolve()


def of_values(run: Any) -> Iterator[str]:
    """Yield the refusals of values as they were asked for, in the order of the checks."""
    a = run.asked
    if run.line.only_asks and not min(a.dry_run, a.plan) == 0 < max(a.dry_run, a.plan):
        yield "--plan N and --dry-run RANKS take 1 or more, and not both together"
    if broken := media_violation(a, run.preset):
        yield broken
    if a.report and not (a.metrics_out and a.eval_iters):
        yield (
            "--report shows the metrics file and what the model reads: add --metrics-out FILE and "
            "--eval-iters N"
        )
    if a.wandb_project and not (a.wandb_exp_name and (a.save or a.wandb_save_dir)):
        yield "--wandb-project needs --wandb-exp-name NAME, and --wandb-save-dir DIR or --save DIR"
    every, kept = a.save_interval, a.save_retain_interval
    if a.save and every and kept and kept % every:
        yield (
            f"--save-retain-interval {kept} must be a multiple of --save-interval {every}; "
            f"nearest: {max(1, round(kept / every)) * every}"
        )
    if a.keep_best and not (a.save and a.eval_iters):
        yield "--keep-best needs --save DIR and --eval-iters N"
    yield from _of_numbers(a)
    if a.keep_best and a.eval_interval % every:
        yield (
            f"--keep-best {a.keep_best} takes saves of evaluated steps: --save-interval {every} "
            f"must divide --eval-interval {a.eval_interval}"
        )
    if a.report and a.report.suffix != ".html":
        yield f"--report {a.report}: it is a page, whose name must end in .html"
    if a.pack and a.micro_batch_size != 1:
        yield "--pack makes one row a microbatch: --micro-batch-size must be 1"
    if a.pack and a.seq_length % a.sample_multiple:
        yield f"--sample-multiple {a.sample_multiple} must divide --seq-length {a.seq_length}"
    if a.train_samples is not None and a.train_samples < a.global_batch_size:
        yield (
            f"--train-samples {a.train_samples} must be {a.global_batch_size} or more, the samples "
            "of a step"
        )
    steps = a.lr_decay_iters or a.train_iters
    if steps and a.lr_warmup_iters >= steps:
        yield f"--lr-warmup-iters {a.lr_warmup_iters} must be less than {steps} steps"


def _of_numbers(args: Any) -> Iterator[str]:
    """Yield the refusals of numbers out of range."""
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
