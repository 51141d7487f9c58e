# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""All rules of ``pretrain_nemotron_vlm.py``, which are checked once a run."""

from dataclasses import replace
from typing import Any

from examples.mimo.common.layout import TOKEN_MULTIPLE, Batch
from examples.mimo.common.layout_rules import main_layers
from examples.mimo.common.megatron_rules import FAMILIES, OF_MEGATRON
from examples.mimo.common.rules import (
    ON_ENGINE,
    Rule,
    not_local,
    refused,
    with_graphs,
)
from examples.mimo.nemotron_vlm.data import have_equal_images
from examples.mimo.nemotron_vlm.options.derived import (
    graphs_overlap,
    lacking_for_flash,
    loads_amid_collectives,
)
from examples.mimo.nemotron_vlm.options.layout_rules import ranks_of_modules, violation
from examples.mimo.nemotron_vlm.options.value_rules import OF_VALUES
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.enums import CudaGraphModule

MTP = "--hybrid-layer-pattern MEM*/E*"
ADAPTER_OPTIONS = (
    "--lora-alpha --lora-dropout --lora-rs --lora-target-modules --train-parts".split()
)


def _depths(run: Any) -> int:
    """Return the number of later tokens that multi-token prediction predicts."""
    return run.asked.hybrid_layer_pattern.count(Symbols.MTP_SEPARATOR)


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
    not_local("--attention-dropout", "--attention-dropout 0.1"),
    Rule(
        "--num-layers or --mtp-num-layers of another number than --hybrid-layer-pattern",
        lambda r: (
            r.asked.mtp_num_layers not in (None, _depths(r))
            or r.asked.num_layers
            not in (None, len(main_layers(r.args.hybrid_layer_pattern).replace("|", "")))
        ),
        "the pattern gives all layers, for later tokens too: MEM*/E*/E* is for two tokens",
        example="--num-layers 2",
    ),
    Rule(
        "--hybrid-layer-pattern with multi-token prediction, tied embeddings and a pipeline",
        lambda r: (
            _depths(r)
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
    Rule(
        "--no-use-distributed-optimizer with --save or --load",
        lambda r: (
            not r.args.use_distributed_optimizer
            and (
                (r.args.save and not r.args.no_save_optim)
                or (r.args.load and not (r.args.no_load_optim or r.args.finetune))
            )
        ),
        "a checkpoint of fp32 weights cannot be loaded again, and 16-bit weights cannot be saved",
        "leave it out, or add --no-save-optim, and --no-load-optim",
        "--no-use-distributed-optimizer --save s",
    ),
    refused(
        "--recompute-encoder with --placement non-colocated",
        "only a schedule of colocated modules runs encoders again",
        example="--placement non-colocated --recompute-encoder 2",
    ),
]

OF_GRAPHS = [
    with_graphs(
        "--pack and attention in --cuda-graph-modules, or context parallelism",
        "a graph has one shape, and packed rows differ in their samples",
        "--bf16 --pack --cuda-graph-modules attn mamba",
        lambda r: (
            r.args.pack
            and (
                r.layouts.language.cp > 1
                or CudaGraphModule.attn in (r.args.cuda_graph_modules or [CudaGraphModule.attn])
            )
        ),
    ),
    with_graphs(
        "--placement non-colocated or multi-token prediction",
        "it has not been shown to work",
        "--placement non-colocated",
        lambda r: r.layouts.non_colocated or _depths(r),
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
]


def _of_batch(run: Any, batch: Batch) -> str | None:
    """Return the first rule that the layouts break with a batch, or None."""
    layouts, world_size = replace(run.layouts, batch=batch), run.args.world_size
    ranks = ranks_of_modules(*run.wanted, world_size, layouts.placement)
    return violation(layouts, ranks, run.preset)


def _of_instances(run: Any) -> str | None:
    instances = run.asked.num_distributed_optimizer_instances
    for layout in run.layouts.modules:
        if layout.dp % instances or layout.expt_dp % instances:
            return (
                f"--num-distributed-optimizer-instances {instances} must divide dp={layout.dp} and "
                f"expt_dp={layout.expt_dp}, the replicas of experts, of {layout}"
            )
    return None


def _of_flash(run: Any) -> str | None:
    lacking = run.args.encoder_attention == "flash4" and lacking_for_flash(run.args)
    return f"--encoder-attention flash4 needs {lacking}; te does not" if lacking else None


def _of_evaluation(run: Any) -> str | None:
    """Return the first of the rules of training's batches that evaluation's batches break."""
    args = run.args
    if not args.eval_iters:
        return None
    size, micro_size = args.eval_global_batch_size, args.eval_micro_batch_size
    broken = _of_batch(run, Batch(size, micro_size, args.seq_length))
    if not broken:
        return None
    return f"--eval-global-batch-size {size}, --eval-micro-batch-size {micro_size}: {broken}"


OF_LAYOUTS = [
    Rule(
        "",
        lambda r: next(filter(None, (_of_batch(r, each) for each in r.batches)), None),
        example="--global-batch-size 30",
    ),
    Rule(
        "--encoder-macro-batch with --placement non-colocated or a pipeline",
        lambda r: (
            r.args.encoder_macro_batch > 1
            and (r.layouts.non_colocated or r.layouts.language.pp > 1)
        ),
        "with a pipeline, all microbatches of a step are encoded at once",
        example="--language pp=2 --encoder-macro-batch 2",
    ),
    with_graphs(
        "--encoder-macro-batch that does not divide the microbatches of a step",
        "the graphs of a smaller one would overwrite memory",
        "--data mock --language dp=2 --global-batch-size 24 --encoder-macro-batch 2",
        lambda r: graphs_overlap(r.args, r.layouts, r.args.encoder_macro_batch),
    ),
    Rule("", _of_instances, example="--num-distributed-optimizer-instances 2 --language tp=2"),
    Rule(
        "--sample-multiple",
        lambda r: r.asked.pack and r.asked.sample_multiple % r.layouts.language.token_multiple,
        f"{{sample_multiple}} does not go with --language {{language}}: take {TOKEN_MULTIPLE}",
        example="--pack --seq-length 64 --sample-multiple 2 --language cp=2",
    ),
    Rule("", _of_flash, example="--encoder-attention flash4"),
]

OF_DERIVED = [
    Rule("", lambda r: r.failed, example="--fp16 --bf16"),
    Rule(
        "--pack with a --micro-batch-size or --eval-micro-batch-size other than 1",
        lambda r: (
            r.args.pack
            and (r.args.micro_batch_size, r.args.eval_iters and r.args.eval_micro_batch_size)
            not in ((1, 0), (1, 1))
        ),
        "it makes one row a microbatch",
        example="--pack --micro-batch-size 2",
    ),
    with_graphs(
        "--eval-micro-batch-size above --micro-batch-size",
        "graphs have buffers for one size",
        "--data mock --micro-batch-size 4 --eval-micro-batch-size 8 --eval-iters 1",
        lambda r: r.args.eval_iters and r.args.eval_micro_batch_size > r.args.micro_batch_size,
    ),
    Rule(
        "",
        _of_evaluation,
        example="--language pp=2,vpp=2 --eval-iters 1 --eval-micro-batch-size 32",
    ),
]
"""Rules for values that Megatron derives, which it does not where its own checks fail."""

RULES = [*FAMILIES, *OF_MEGATRON, *OF_OWN_OPTIONS, *OF_GRAPHS, *OF_VALUES, *OF_LAYOUTS, *OF_DERIVED]
"""All rules, in the order in which they are checked."""
