# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""All rules of ``pretrain_nemotron_vlm.py``, which are checked once a run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from examples.mimo.common.layout import COLOCATED, TOKEN_MULTIPLE, Batch
from examples.mimo.common.layout_rules import main_layers
from examples.mimo.common.megatron_rules import OF_MEGATRON
from examples.mimo.common.refused_options import FAMILIES
from examples.mimo.common.rules import (
    ON_ENGINE,
    Rule,
    has,
    not_local,
    refusals,
    refused,
    with_graphs,
)
from examples.mimo.nemotron_vlm.data import have_equal_images
from examples.mimo.nemotron_vlm.options.derived import (
    graphs_overlap,
    lacking_for_flash,
    loads_amid_collectives,
)
from examples.mimo.nemotron_vlm.options.fp8_rules import of_fp8
from examples.mimo.nemotron_vlm.options.layout_rules import ranks_of_modules, violation
from examples.mimo.nemotron_vlm.options.value_rules import of_values
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
from megatron.core.transformer.enums import CudaGraphModule

OWN_GROUP = "Megatron would recompute these layers in a TP group of its own, which is not made"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
MTP = "--hybrid-layer-pattern MEM*/E*"
ADAPTER_OPTIONS = (
    "--lora-alpha --lora-dropout --lora-rs --lora-target-modules --train-parts".split()
)


def _is_unaligned(run: Any) -> bool:
    """Tell whether upstream's Mamba layer has rows that its kernel takes for one sample only."""
    args, language = run.args, run.layouts.language
    if "M" not in args.hybrid_layer_pattern or language.cp > 1:  # with CP these rows are copied
        return False
    heads, groups = args.mamba_num_heads, args.mamba_num_groups
    row = heads + 2 * heads * args.mamba_head_dim + 2 * groups * args.mamba_state_dim
    return row // max(1, language.tp) % 8 != 0


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


OF_OWN_OPTIONS = [
    refused(
        "--linear-cp-mode other than chunkwise",
        "it was dropped",
        "state passing (chunkwise, the default) takes any cp",
        "--linear-cp-mode headwise",
    ),
    Rule(
        "--lora-dim with --fp4-format or --moe-shared-expert-overlap",
        lambda r: r.args.lora_dim and (r.args.fp4 or r.args.moe_shared_expert_overlap),
        "it has not been shown to work",
        example=f"{ON_ENGINE} --bf16 --moe-shared-expert-overlap --lora-dim 8",
    ),
    refused(
        "--lora-dim with --freeze",
        "all weights but adapters are frozen",
        "--train-parts names the parts that are trained, too",
        "--lora-dim 8 --freeze encoder",
    ),
    Rule(
        "--lora-alpha or another option of adapters without --lora-dim",
        lambda r: not r.args.lora_dim and {*ADAPTER_OPTIONS} & r.line.given,
        "it would do nothing",
        "add --lora-dim N",
        "--lora-alpha 16",
    ),
    Rule(
        "--transformer-impl transformer_engine in fp32 with --pack, --dynamic-resolution or "
        "context parallelism",
        lambda r: (
            (r.args.pack or r.args.dynamic_resolution or r.layouts.language.cp > 1)
            and r.args.transformer_impl != "local"
            and not (r.args.bf16 or r.args.fp16)
        ),
        "its attention has them in 16 bits alone",
        "add --bf16, or choose local",
        f"{ON_ENGINE} --language cp=2",
    ),
    Rule(
        "--mamba-num-heads that leave unaligned rows with --pack",
        lambda r: r.args.pack and r.args.device == "cuda" and _is_unaligned(r),
        "the kernel of the causal convolution needs (2 · heads · head dim + 2 · groups · state dim "
        "+ heads) / tp to be a multiple of 8",
        example=f"{ON_ENGINE} --bf16 --pack --mamba-num-heads 12",
    ),
    not_local("--attention-dropout", "--attention-dropout 0.1"),
    Rule(
        "--num-layers or --mtp-num-layers of another number than --hybrid-layer-pattern",
        lambda r: (
            r.asked.mtp_num_layers not in (None, depths(r))
            or r.asked.num_layers
            not in (None, len(main_layers(r.args.hybrid_layer_pattern).replace("|", "")))
        ),
        "the pattern gives all layers, for later tokens too: MEM*/E*/E* is for two tokens",
        example="--num-layers 2",
    ),
    Rule(
        "--hybrid-layer-pattern with multi-token prediction, tied embeddings and a pipeline",
        lambda r: (
            depths(r)
            and not r.args.untie_embeddings_and_output_weights
            and (r.layouts.non_colocated or r.layouts.language.pp > 1)
        ),
        "Megatron would give the last stage an output layer beside the tied embedding",
        "leave out --no-untie-embeddings-and-output-weights",
        f"--language pp=2 {MTP} --no-untie-embeddings-and-output-weights",
    ),
    Rule(
        "--no-calculate-per-token-loss",
        lambda r: not r.args.calculate_per_token_loss,
        "ranks have answers of different lengths, and a mean of their means depends on the layout",
    ),
    Rule(
        "--no-dist-ckpt-optim-fully-reshardable",
        lambda r: r.args.use_distributed_optimizer and not r.args.dist_ckpt_optim_fully_reshardable,
        "an optimizer of several modules is saved so that any layout can load it, and no other way",
    ),
    refused(
        "--recompute-encoder with --placement non-colocated",
        "only a schedule of colocated modules runs encoders again",
        example="--placement non-colocated --recompute-encoder 2",
    ),
    refused(
        "--save-tokenizer-assets",
        "no tokenizer is loaded, as the samples bring their ids",
        example=None,
    ),
]

OF_GRAPHS = [
    with_graphs(
        "--pack and attention in --cuda-graph-modules, or context parallelism",
        "a graph has one shape, and packed rows differ in their samples",
        "--bf16 --pack --cuda-graph-modules attn mamba",
        lambda r: r.args.pack and (r.layouts.language.cp > 1 or _captures_attention(r.args)),
    ),
    with_graphs(
        "--placement non-colocated or multi-token prediction",
        "it has not been shown to work",
        "--placement non-colocated",
        lambda r: r.layouts.non_colocated or depths(r),
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
    Rule(
        "--recompute-granularity full with multi-token prediction in FP8",
        lambda r: _in_8_bits(r) and r.args.recompute_granularity == "full" and depths(r),
        OWN_GROUP,
        example=f"{ON_ENGINE} {FP8} --recompute-granularity full {MTP}",
    ),
]

RULES = [*FAMILIES, *OF_MEGATRON, *OF_OWN_OPTIONS, *OF_GRAPHS]
"""Rules that name the options which break them, in the order in which they are checked."""


def of_run(run: Any) -> Iterator[str]:
    """Yield the refusals of all rules, in the order in which they are checked.

    The last ones need Megatron's derived values.
    """
    yield from refusals(run, RULES)
    yield from of_values(run)
    yield from of_layouts(run)
    if run.failed:
        yield str(run.failed)
    yield from of_evaluation(run)
    yield from of_fp8(run)


def of_layouts(run: Any) -> Iterator[str]:
    """Yield the refusals of layouts, and of options that the layouts do not take."""
    args, language = run.args, run.layouts.language
    for batch in run.batches:
        if broken := _layouts_violation(run, batch):
            yield broken
    at_once, count = args.encoder_macro_batch, run.layouts.num_microbatches
    if at_once > 1 and (run.layouts.non_colocated or language.pp > 1):
        yield (
            f"--encoder-macro-batch needs --placement {COLOCATED} and a language model with pp=1; "
            "with a pipeline, all microbatches of a step are encoded at once"
        )
    if graphs_overlap(args, run.layouts, at_once):
        yield (
            f"--cuda-graph-impl local: --encoder-macro-batch {at_once} must divide "
            f"the {count} microbatches of a step"
        )
    instances = run.asked.num_distributed_optimizer_instances
    for layout in run.layouts.modules:
        if layout.dp % instances or layout.expt_dp % instances:
            yield (
                f"--num-distributed-optimizer-instances {instances} must divide dp={layout.dp} and "
                f"expt_dp={layout.expt_dp}, the replicas of experts, of {layout}"
            )
    if run.asked.pack and run.asked.sample_multiple % language.token_multiple:
        yield (
            f"--sample-multiple {run.asked.sample_multiple}: --language {language} needs a "
            f"multiple of {language.token_multiple} ({TOKEN_MULTIPLE})"
        )
    if args.encoder_attention == "flash4" and (lacking := lacking_for_flash(args)):
        yield f"--encoder-attention flash4 needs {lacking}; te does not"


def of_evaluation(run: Any) -> Iterator[str]:
    """Yield the refusals of evaluation's batches, by the rules that training's batches keep."""
    args = run.args
    if not args.eval_iters:
        return
    size, micro_size = args.eval_global_batch_size, args.eval_micro_batch_size
    if args.pack and micro_size != 1:
        yield "--pack makes one row a microbatch: --eval-micro-batch-size must be 1"
    if args.cuda_graph_impl == "local" and micro_size > args.micro_batch_size:
        yield (
            f"--cuda-graph-impl local: --eval-micro-batch-size {micro_size} must be "
            f"{args.micro_batch_size} or less, the size for which graphs have buffers"
        )
    if broken := _layouts_violation(run, Batch(size, micro_size, args.seq_length)):
        yield f"--eval-global-batch-size {size}, --eval-micro-batch-size {micro_size}: {broken}"


def _layouts_violation(run: Any, batch: Batch) -> str | None:
    """Return the first rule that the layouts break with a batch, or None."""
    layouts, world_size = replace(run.layouts, batch=batch), run.args.world_size
    ranks = ranks_of_modules(*run.wanted, world_size, layouts.placement)
    return violation(layouts, ranks, run.preset)
