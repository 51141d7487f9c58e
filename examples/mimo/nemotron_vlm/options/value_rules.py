# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for the values of options, whatever the layouts."""

from argparse import Namespace
from pathlib import Path

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import SIZES, option_of

AT_LEAST_1 = """micro_batch_size global_batch_size seq_length encoder_macro_batch sample_multiple
    pack_window train_iters eval_interval save_interval log_interval max_tiles video_frames
    distributed_timeout_minutes hidden_size num_attention_heads num_query_groups kv_channels
    num_distributed_optimizer_instances eval_global_batch_size eval_micro_batch_size
    lr_decay_iters ddp_num_buckets log_memory_interval""".split()
AT_LEAST_1 += [name for names in SIZES.values() for name in names.values()]
AT_LEAST_1_WITH = {
    "E": "moe_ffn_hidden_size moe_router_topk",
    "M": "mamba_state_dim mamba_head_dim mamba_num_groups",
    "G": "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads",
}
"""Sizes of layers, which do not matter where the pattern has none of them."""
FRACTIONS = "hidden_dropout attention_dropout adam_beta1 adam_beta2 lr_warmup_fraction".split()
"""Options that must be below 1."""
AT_LEAST_0 = """num_workers eval_iters lr_warmup_iters recompute_encoder seed lr min_lr
    lr_warmup_init weight_decay adam_eps init_method_std loss_scale ffn_hidden_size
    distributed_timeout_seconds_after_init""".split()
LEAST = dict.fromkeys(AT_LEAST_1, 1) | dict.fromkeys([*AT_LEAST_0, *FRACTIONS], 0)
MOST = {"min_lr": "lr", "lr_warmup_init": "lr", "moe_router_topk": "num_experts"}
"""Options that must not be larger than another."""
PICTURES = ".png", ".pdf", ".svg"
"""Ends of the names of a report."""


def saves_into(args: Namespace, folder: str | None) -> bool:
    """Return whether a folder is the one in which the run saves its checkpoints."""
    return bool(folder and args.save) and Path(folder).resolve() == Path(args.save).resolve()


def check_values(args: Namespace) -> None:
    """Refuse numbers out of range, and options that lack others.

    Raises:
        UserError: the message names the option, and the value or option that it needs.
    """
    if args.report and not args.metrics_out:
        raise UserError("--report draws the metrics file: add --metrics-out FILE")
    if args.report and not args.eval_iters:
        raise UserError("--report shows what the model reads: add --eval-iters N")
    if args.wandb_project and not args.wandb_exp_name:
        raise UserError("--wandb-project needs --wandb-exp-name NAME")
    if args.wandb_project and not (args.save or args.wandb_save_dir):
        raise UserError("--wandb-project needs --wandb-save-dir DIR, or --save DIR")
    every, kept = args.save_interval, args.save_retain_interval
    if args.save and every and kept and kept % every:
        raise UserError(
            f"--save-retain-interval {kept} must be a multiple of --save-interval {every}; "
            f"nearest: {max(1, round(kept / every)) * every}"
        )
    layers = (names for one, names in AT_LEAST_1_WITH.items() if one in args.hybrid_layer_pattern)
    sizes = dict.fromkeys(" ".join(layers).split(), 1)
    for name, least in (LEAST | sizes).items():
        given = getattr(args, name)
        if given is not None and not given >= least:  # nor not a number
            raise UserError(f"{option_of(name)} must be {least} or more")
    for name in FRACTIONS:
        if (getattr(args, name) or 0) >= 1:
            raise UserError(f"{option_of(name)} must be below 1")
    for name, other in MOST.items():
        given, most = getattr(args, name), getattr(args, other)
        if None not in (given, most) and given > most:
            raise UserError(f"{option_of(name)} {given} must be at most {option_of(other)} {most}")
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads % groups:
        raise UserError(
            f"--num-attention-heads {heads} must be a multiple of --num-query-groups {groups}"
        )
    if args.report and args.report.suffix not in PICTURES:
        raise UserError(f"--report {args.report}: its name must end in {' or '.join(PICTURES)}")
    if args.pack and args.micro_batch_size != 1:
        raise UserError("--pack makes one row a microbatch: --micro-batch-size must be 1")
    if args.pack and args.seq_length % args.sample_multiple:
        raise UserError(
            f"--sample-multiple {args.sample_multiple} must divide --seq-length {args.seq_length}"
        )
