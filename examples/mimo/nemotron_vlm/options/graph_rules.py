# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules about CUDA graphs, and about layers that run again."""

from typing import Any

from examples.mimo.common.rules import ON_ENGINE, Rule, has, with_graphs
from examples.mimo.nemotron_vlm.data import have_equal_images
from examples.mimo.nemotron_vlm.options.derived import loads_amid_collectives
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
from megatron.core.transformer.enums import CudaGraphModule

OWN_GROUP = "Megatron would recompute these layers in a TP group of its own, which is not made"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
MTP = "--hybrid-layer-pattern MEM*/E*"


def depths(run: Any) -> int:
    """Return the number of later tokens that multi-token prediction predicts.

    A pattern that cannot be read has none: Megatron's own checks refuse it.
    """
    try:
        return parse_hybrid_pattern(run.asked.hybrid_layer_pattern).mtp_num_depths
    except ValueError:
        return 0


def _in_8_bits(run: Any) -> bool:
    """Return whether the language model's products are in 8 or 4 bits."""
    parts = run.args.fp8_parts.split(",")
    return bool(run.args.fp4 or (run.args.fp8 and (parts == [""] or "language" in parts)))


def _captures_attention(args: Any) -> bool:
    return not args.cuda_graph_modules or CudaGraphModule.attn in args.cuda_graph_modules


OF_GRAPHS = [
    with_graphs(
        "--pack and attention in --cuda-graph-modules, or context parallelism",
        "a graph has one shape, and packed rows differ in their samples",
        "--bf16 --pack --cuda-graph-modules attn mamba",
        lambda r: r.args.pack and (r.layouts.language.cp > 1 or _captures_attention(r.args)),
    ),
    with_graphs(
        "--placement non-colocated", "it has not been shown to work", "--placement non-colocated"
    ),
    with_graphs(
        "--lora-dropout with recomputation",
        "a layer that runs again without its graph would drop others",
        "--lora-dim 8 --lora-dropout 0.1 --recompute-granularity selective",
        lambda r: r.args.lora_dropout and r.args.recompute_granularity,
    ),
    with_graphs(
        "--recompute-encoder and images of one size",
        "a graph's backward keeps the activations of its forward",
        "--data mock --recompute-encoder 1",
        lambda r: r.args.recompute_encoder and have_equal_images(r.args),
    ),
    with_graphs(
        "--overlap-grad-reduce or --overlap-param-gather, and images that vary",
        "new shapes need new kernels, and loading one waits for all work on the device",
        "--bf16 --dynamic-resolution --overlap-grad-reduce",
        lambda r: (
            loads_amid_collectives(r.args)
            and (r.args.overlap_grad_reduce or r.args.overlap_param_gather)
        ),
    ),
    with_graphs(
        "--recompute-modules moe in FP8",
        OWN_GROUP,
        f"{FP8} --recompute-granularity selective --recompute-modules moe",
        lambda r: (
            _in_8_bits(r)
            and has(r, "--recompute-granularity selective")
            and "moe" in (r.args.recompute_modules or ())
        ),
    ),
    with_graphs(
        "multi-token prediction",
        "no graph of its layers has been shown to work",
        f"--bf16 --data mock {MTP}",
        depths,
    ),
    Rule(
        "--recompute-granularity full with multi-token prediction in FP8",
        lambda r: _in_8_bits(r) and r.args.recompute_granularity == "full" and depths(r),
        OWN_GROUP,
        example=f"{ON_ENGINE} {FP8} --recompute-granularity full {MTP}",
    ),
]
