# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for the sizes of matrix products in FP8: with others, Transformer Engine ends a step.

Both dims of each matrix on a rank are multiples of 16, of 32 in mxfp8. Only Transformer Engine's
layers are in FP8: embeddings, routers, the output layer and projectors are not.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from examples.mimo.common.layout import Layout, option_of
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.moe.device_counts import counts_stay_on_device
from megatron.core.transformer.transformer_config import TransformerConfig

VIT = Symbols.ATTENTION + Symbols.MLP
"""Layers of an encoder, as a pattern."""


def of_fp8(run: Any) -> Iterator[str]:
    """Yield the refusals of sizes of parts in FP8 that its products do not take."""
    args, configs = run.args, run.configs
    if configs.language.fp8:
        yield from _token_violations(args, run.layouts.language, configs.language)
    parts = [("language", args.hybrid_layer_pattern, configs.language, run.layouts.language)]
    encoders = zip(run.preset.encoders, configs.encoders, run.layouts.encoders, strict=True)
    parts += [(f"{each.name}:encoder", VIT, own["encoder"], lay) for each, own, lay in encoders]
    for part, layers, config, layout in parts:
        if not config.fp8 or config.quant_recipe:  # which may leave any layer in 16 bits
            continue
        multiple = get_fp8_align_size(config.fp8_recipe)
        for what, size in features_of_rank(layers, config, layout):
            if size % multiple:
                yield (
                    f"--fp8-format: {part}: {what} = {size} must be a multiple of {multiple} with "
                    f"--fp8-recipe {config.fp8_recipe}; choose another size or layout, or "
                    "--fp8-parts without it"
                )


def features_of_rank(
    layers: str, c: TransformerConfig, layout: Layout
) -> Iterator[tuple[str, int]]:
    """Yield the features of a rank that products of these layers have, after what they are."""
    tp, etp = layout.tp, layout.etp
    yield "hidden size", c.hidden_size
    if Symbols.ATTENTION in layers:
        queries, keys = (n * c.kv_channels for n in (c.num_attention_heads, c.num_query_groups))
        gates = queries * c.attention_output_gate
        yield f"attention heads · channels / tp={tp}", queries // tp
        yield f"queries, keys and values / tp={tp}", (queries + 2 * keys + gates) // tp
    if Symbols.MLP in layers:
        yield f"FFN rows / tp={tp}", c.ffn_hidden_size // tp
    if Symbols.MAMBA in layers:
        inner = c.mamba_num_heads * c.mamba_head_dim
        states = c.mamba_num_groups * c.mamba_state_dim
        yield f"Mamba heads · head dim / tp={tp}", inner // tp
        of_projection = 2 * inner + 2 * states + c.mamba_num_heads
        yield f"rows of Mamba's input projection / tp={tp}", of_projection // tp
    if Symbols.GDN in layers:
        keys = c.linear_num_key_heads * c.linear_key_head_dim
        values = c.linear_num_value_heads * c.linear_value_head_dim
        yield f"value heads · value head dim of delta nets / tp={tp}", values // tp
        of_projection = 2 * keys + 2 * values + 2 * c.linear_num_value_heads
        yield f"rows of a delta net's input projection / tp={tp}", of_projection // tp
    if Symbols.MOE in layers:
        if not counts_stay_on_device(c):  # else in 16 bits
            yield f"FFN rows of an expert / etp={etp}", c.moe_ffn_hidden_size // etp
        yield (
            f"FFN rows of the shared expert / tp={tp}",
            (c.moe_shared_expert_intermediate_size or 0) // tp,
        )
        yield "MoE latent size", c.moe_latent_size or 0
    if Symbols.MTP_SEPARATOR in layers:
        yield f"hidden size / tp={tp}", c.hidden_size // tp


def _token_violations(args: Namespace, layout: Layout, config: TransformerConfig) -> Iterator[str]:
    """Yield the microbatches of a rank whose tokens products in FP8 do not take.

    The gradient of a weight sums over the tokens of a TP group, in multiples of 16 (of 32 in
    mxfp8). Transformer Engine quantizes a rank's share in multiples of 8, of 32 in mxfp8, and a
    projection into the experts' latent space has that share alone.
    """
    whole = get_fp8_align_size(config.fp8_recipe)
    share = 8 if whole == 16 and not config.moe_latent_size else whole
    multiple = math.lcm(whole, share * layout.tp)
    sizes = {"micro_batch_size": args.micro_batch_size}
    if args.eval_iters:
        sizes["eval_micro_batch_size"] = args.eval_micro_batch_size
    for name, size in sizes.items():
        if (tokens := args.seq_length * size // layout.cp) % multiple:
            yield (
                f"--fp8-format: --seq-length {args.seq_length} · {option_of(name)} {size} / "
                f"cp={layout.cp} = {tokens} tokens must be a multiple of {multiple} with "
                f"--fp8-recipe {args.fp8_recipe} and tp={layout.tp}"
            )
