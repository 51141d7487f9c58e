# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that the layout of a language model must keep.

Pure arithmetic: no process, no device. Every rank reaches the same verdict from the same text.
"""

from typing import Any

from examples.mimo.common.layout import TOKEN_MULTIPLE, Batch, Layout
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols


def never_spanned(layout: Layout, world_size: int) -> str | None:
    """Return why no dp makes a layout span ``world_size`` ranks, or None."""
    others = layout.tp * layout.cp * layout.pp
    if world_size <= others or world_size % others == 0:
        return None
    return (
        f"tp·cp·pp = {layout.tp}·{layout.cp}·{layout.pp} = {others} must divide the "
        f"{world_size} ranks: {others}·dp is never {world_size}"
    )


def size_violation(layout: Layout, world_size: int) -> str | None:
    """Return why a layout does not span ``world_size`` ranks, or None."""
    if layout.size == world_size:
        return None
    if broken := never_spanned(layout, world_size):
        return broken
    launcher = f"; torchrun --nproc-per-node {layout.size} starts more" if world_size == 1 else ""
    return (
        f"tp·cp·dp·pp = {layout.tp}·{layout.cp}·{layout.dp}·{layout.pp} = {layout.size} "
        f"must equal the {world_size} rank{'s' * (world_size > 1)}{launcher}"
    )


def undivided(axis: str, size: int, counts: dict[str, int]) -> str | None:
    """Return why ``size`` of an axis does not divide one of ``counts``, or None."""
    left_over = ((n, what) for what, n in counts.items() if n % size)
    return next((f"{axis}={size} must divide the {n} {what}" for n, what in left_over), None)


def language_violation(lay: Layout, world_size: int, p: Any, batch: Batch) -> str | None:
    """Return the first rule that a layout of the language model breaks, or None.

    Args:
        p: sizes of the language model, by the names of Megatron's arguments.
    """
    layers = main_layers(p.hybrid_layer_pattern)
    heads = {"attention heads": p.num_attention_heads, "query groups": p.num_query_groups}
    if "M" in p.hybrid_layer_pattern:
        heads |= {"Mamba heads": p.mamba_num_heads, "Mamba groups": p.mamba_num_groups}
    if "G" in p.hybrid_layer_pattern:
        heads["key heads"] = p.linear_num_key_heads
        heads["value heads"] = p.linear_num_value_heads
    ranks, samples = lay.tp * lay.cp * lay.dp, batch.micro_size * lay.dp
    microbatches = batch.global_size // samples
    if broken := (
        undivided("tp", lay.tp, heads)
        or undivided("ep", lay.ep, {"experts": p.num_experts})
        or undivided("etp", lay.etp, {"FFN rows": p.moe_ffn_hidden_size})
    ):
        return broken
    if len(layers) % (lay.pp * lay.vpp) and "|" not in layers:
        return f"pp·vpp = {lay.pp * lay.vpp} must divide the {len(layers)} layers"
    if lay.vpp > 1 and lay.pp == 1:
        return f"vpp={lay.vpp} needs pp of 2 or more"
    if lay.vpp > 1 and microbatches % lay.pp:
        return f"with vpp, pp={lay.pp} must divide the {microbatches} microbatches"
    if broken := size_violation(lay, world_size):
        return broken
    if ranks % (lay.ep * lay.etp):
        return f"ep·etp = {lay.ep}·{lay.etp} must divide tp·cp·dp = {ranks}"
    if batch.seq_length % lay.token_multiple:
        return (
            f"the sequence length {batch.seq_length} must be a multiple of {lay.token_multiple} "
            f"({TOKEN_MULTIPLE})"
        )
    if batch.global_size % samples:
        return (
            f"the global batch {batch.global_size} must be a multiple of micro batch × dp "
            f"= {batch.micro_size}·{lay.dp} = {samples}"
        )
    return None


def main_layers(pattern: str) -> str:
    """Return the part of a pattern before the layers of multi-token prediction."""
    return pattern.split(Symbols.MTP_SEPARATOR)[0]


def staged_pattern(pattern: str, layout: Layout) -> str:
    """Return the pattern with ``|`` between (virtual) pipeline stages of equally many layers."""
    main, *predicting = pattern.split(Symbols.MTP_SEPARATOR)
    size = len(main) // (layout.pp * layout.vpp)
    staged = "|".join(main[i : i + size] for i in range(0, len(main), size))
    return Symbols.MTP_SEPARATOR.join([staged, *predicting])
