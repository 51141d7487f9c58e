# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options that ``pretrain_nemotron_vlm.py`` alone refuses, and the reasons."""

import re
from argparse import SUPPRESS, ArgumentParser, Namespace

from examples.mimo.common.layout import COLOCATED, asked_layout
from examples.mimo.common.layout_rules import main_layers
from examples.mimo.common.refusals import WHEREVER_SET, Refusal, not_local, with_graphs
from examples.mimo.nemotron_vlm.options.own_options import THREE_PHASES
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern


def _is_unaligned(args: Namespace) -> bool:
    """Tell whether upstream's Mamba layer has rows that its kernel takes for one sample only."""
    language = asked_layout(args, "language")
    if "M" not in args.hybrid_layer_pattern:
        return False
    if language.cp > 1:
        return False  # these layers copy such rows
    heads, groups = args.mamba_num_heads, args.mamba_num_groups
    row = heads + 2 * heads * args.mamba_head_dim + 2 * groups * args.mamba_state_dim
    return row // language.tp % 8 != 0


def _depths(args: Namespace) -> int:
    """Return the number of later tokens that multi-token prediction predicts."""
    return parse_hybrid_pattern(args.hybrid_layer_pattern).mtp_num_depths


def _in_8_bits(args: Namespace) -> bool:
    """Return whether the language model's products are in 8 or 4 bits."""
    parts = args.fp8_parts.split(",")
    return bool(args.fp4 or (args.fp8 and (parts == [""] or "language" in parts)))


OWN_GROUP = "Megatron would recompute these layers in a TP group of its own, which is not made"

OF_OWN_OPTIONS = [
    Refusal(
        "--linear-cp-mode headwise",
        lambda args: args.linear_cp_mode != "chunkwise",
        "it was dropped; state passing (chunkwise, the default) takes any cp",
    ),
    Refusal(
        "--encoder-schedule bubbles",
        lambda args: args.encoder_schedule != THREE_PHASES,
        f"it was dropped, as no real data could use it; leave it out, which is {THREE_PHASES}",
    ),
    with_graphs(
        "--pack",
        lambda args: args.pack,
        "a graph has one shape, and packed rows differ in their samples",
    ),
    with_graphs(
        "--placement", lambda args: args.placement != COLOCATED, "it has not been shown to work"
    ),
    with_graphs(
        "--freeze", lambda args: args.freeze, "a graph does not run again before its backward has"
    ),
    with_graphs(
        "--recompute-encoder",
        lambda args: args.recompute_encoder,
        "a graph's backward keeps the activations of its forward",
    ),
    with_graphs(
        "--recompute-modules moe in FP8",
        lambda args: (
            _in_8_bits(args)
            and args.recompute_granularity == "selective"
            and "moe" in (args.recompute_modules or ())
        ),
        OWN_GROUP,
    ),
    Refusal(
        "--recompute-granularity full with multi-token prediction in FP8",
        lambda args: _in_8_bits(args) and args.recompute_granularity == "full" and _depths(args),
        OWN_GROUP,
    ),
    Refusal(
        "--transformer-impl transformer_engine in fp32 with --pack, --dynamic-resolution or "
        "context parallelism",
        lambda args: (
            (args.pack or args.dynamic_resolution or asked_layout(args, "language").cp > 1)
            and args.transformer_impl != "local"
            and not (args.bf16 or args.fp16)
        ),
        "its attention has them in 16 bits alone; add --bf16, or choose local",
    ),
    Refusal(
        "--mamba-num-heads that leave unaligned rows with --pack",
        lambda args: args.pack and args.device == "cuda" and _is_unaligned(args),
        "the kernel of the causal convolution needs (2 · heads · head dim + 2 · groups · state dim "
        "+ heads) / tp to be a multiple of 8",
    ),
    not_local("--attention-dropout", lambda args: args.attention_dropout),
    Refusal(
        "--num-layers of another number than --hybrid-layer-pattern",
        lambda args: (
            args.num_layers
            not in (None, len(main_layers(args.hybrid_layer_pattern).replace("|", "")))
        ),
        "the pattern gives the layers",
    ),
    Refusal(
        "--mtp-num-layers of another number than --hybrid-layer-pattern",
        lambda args: args.mtp_num_layers not in (None, _depths(args)),
        "the pattern gives the layers of each later token, such as MEM*/E*/E* for two tokens",
    ),
    with_graphs(
        "multi-token prediction",
        lambda args: _depths(args),
        "no graph of its layers has been shown to work",
    ),
    Refusal(
        "--hybrid-layer-pattern with multi-token prediction, tied embeddings and a pipeline",
        lambda args: (
            _depths(args)
            and not args.untie_embeddings_and_output_weights
            and (args.placement != COLOCATED or asked_layout(args, "language").pp > 1)
        ),
        "Megatron would give the last stage an output layer beside the tied embedding; leave out "
        "--no-untie-embeddings-and-output-weights",
    ),
]
"""Refusals that are checked before Megatron derives arguments."""

TURNED_BACK = [
    Refusal(
        "--no-calculate-per-token-loss",
        lambda args: not args.calculate_per_token_loss,
        "ranks have answers of different lengths, and a mean of their means depends on the layout",
    ),
    Refusal(
        "--no-dist-ckpt-optim-fully-reshardable",
        lambda args: args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable,
        "an optimizer of several modules is saved so that any layout can load it, and no other way",
    ),
    Refusal(
        "--save-tokenizer-assets",
        lambda args: args.save_tokenizer_assets,
        "no tokenizer is loaded, as the samples bring their ids",
    ),
]
"""Refusals to switch off the program's defaults, which others lack."""

OTHER_PROGRAMS = {"rl", "biencoder", "vision", "Logits Distillation", "inference", "sft", "mla"}
OTHER_PROGRAMS |= {"In-process restart", "data and dataloader", "tokenizer"}
"""Groups of Megatron's parser whose options do nothing here, except those in `TAKEN`."""

TAKEN = """--seq-length --num-workers --vocab-size --tokenizer-model
    --cuda-graph-modules --cuda-graph-scope --rotary-scaling-factor --mscale --mscale-all-dim"""

UNREAD = r"""--(en|de)coder-num-layers|--onnx-safe|--relative-attention-.*|--bert-no-binary-head|
    --dist-ckpt-save-pre-mcore-014|--enable-msc|--exit-signal-handler-for-dataloader|--sgd-.*|
    --muon-.*|--lion-.*|--.*fsdp.*|--(outer-dp|data-parallel)-sharding-strategy|
    --no-gradient-reduce-div-fusion|--suggested-communication-unit-size|
    --keep-fp8-transpose-cache|--enable-full-sharding-in-hsdp|--openai-gelu"""
"""Other options that do nothing here: no code reads them, or it belongs to a refused option."""


def idle_options(parser: ArgumentParser) -> dict[str, str]:
    """Return the names of Megatron's options that would do nothing or are refused wherever they
    are set, and why; the parser's help leaves them out."""
    known, unread = parser._option_string_actions, re.compile(re.sub(r"\s", "", UNREAD))
    groups = [group for group in parser._action_groups if group.title in OTHER_PROGRAMS]
    found = {name for group in groups for a in group._group_actions for name in a.option_strings}
    found |= {name for name in known if unread.fullmatch(name)}
    why = dict.fromkeys(found - {*TAKEN.split()}, "nothing in this program reads it")
    why |= {name: reason for reason, names in WHEREVER_SET.items() for name in names.split()}
    for name in why.keys() & known.keys():
        known[name].help = SUPPRESS
    return why
