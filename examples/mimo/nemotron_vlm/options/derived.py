# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Values that follow from other options and from the layouts, unless the user chose them."""

import logging
import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch

from examples.mimo.common.layout import Layouts
from examples.mimo.common.steps import batches_of_first_size, growing_batch
from examples.mimo.nemotron_vlm.data import have_equal_images
from examples.mimo.nemotron_vlm.model.language_loss import has_loss_kernel
from examples.mimo.nemotron_vlm.model.model import parts_in_fp8
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.defaults import saves_asynchronously
from megatron.core.transformer import packed_flash_attention as flash
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.device_counts import counts_stay_on_device

FASTEST = 2
"""Microbatches encoded at once on GPUs: one alone has too little work for its kernels."""


def complete(args: Namespace, preset: VLMPreset) -> None:
    """Fill in the defaults that depend on other options."""

    def default(name: str, value: object) -> None:
        if getattr(args, name) is None:
            setattr(args, name, value)

    if args.use_checkpoint_opt_param_scheduler:
        args.override_opt_param_scheduler = False  # Megatron refuses both together
    args.store_param_remainders = True  # checkpoints have whole master weights, and say so by this
    args.token_ids = {each.name: each.token for each in preset.encoders}  # data may have others
    args.encoder_sizes = {each.name: asdict(each) for each in preset.encoders}  # for checkpoints
    args.begun_in = str(Path.cwd())  # tools resolve a checkpoint's paths by it
    if args.metrics_out:
        args.metrics_out = args.metrics_out.absolute()  # tools find it by a checkpoint
    args.language_std = args.init_method_std  # None: each matrix's follows from its inputs
    default("init_method_std", 0.02)
    if args.train_samples is None:
        default("train_iters", 20)
    if args.step_batch_size_schedule is None:
        default("global_batch_size", 32)
    else:
        # Megatron's own defaults would depend on the layout.
        default("global_batch_size", batch_sizes(args)[0])
        if args.train_iters:
            default("lr_decay_iters", batches_of_first_size(args))
    default("max_position_embeddings", args.seq_length)
    if args.log_straggler:
        default("logging_level", logging.INFO)  # that of its lines
    default("async_save", saves_asynchronously(args))
    is_open = args.cross_entropy_loss_fusion is None and args.cross_entropy_fusion_impl == "native"
    args.loss_kernel = is_open and has_loss_kernel()
    default("cross_entropy_loss_fusion", args.bf16 and not args.loss_kernel)
    has_one_size = have_equal_images(args) and args.step_batch_size_schedule is None
    if args.device == "cuda" and has_one_size:
        # cuDNN's norms are faster, but each number of tokens has its own kernel, made at first use.
        for way in ("FWD", "BWD"):
            os.environ.setdefault(f"NVTE_NORM_{way}_USE_CUDNN", "1")
    default("encoder_attention", encoder_attention(args))
    default("overlap_grad_reduce", args.device == "cuda" and not loads_amid_collectives(args))
    default("overlap_param_gather", args.use_distributed_optimizer and args.overlap_grad_reduce)
    args.use_persistent_ckpt_worker |= args.async_save  # Megatron has no other worker
    default("eval_interval", args.train_iters or 1000)
    # Recurrent layers would move zigzag tokens of several lengths, which only packed rows have.
    default("linear_cp_layout", "contiguous" if args.pack else "zigzag")


def loads_amid_collectives(args: Namespace) -> bool:
    """Return whether an overlapped collective could wait for ever.

    CUDA graphs let the host run ahead. An encoder without them needs new kernels for new numbers
    and sizes of images; loading one waits for all work on the device, so also for other ranks.
    """
    return args.cuda_graph_impl == "local" and not have_equal_images(args)


def batch_sizes(args: Namespace) -> list[int]:
    """Return the global batch sizes of the run, in the order in which they are used."""
    if args.step_batch_size_schedule is None:
        return [args.global_batch_size]
    return [size for _, size in growing_batch(args).schedule]


def encoder_attention(args: Namespace) -> str:
    """Return the kernel of the images' attention: flash-attn-4 where it was measured."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return "flash4" if on_hopper and not lacking_for_flash(args) else "te"


def lacking_for_flash(args: Namespace) -> str | None:
    """Return the first thing that flash-attn-4 needs and the options lack, or None."""
    images = args.encoder_sizes.get(IMAGES)
    width = images["hidden"] // images["heads"] if images else flash.ROUNDED
    needs = {
        "--device cuda": args.device == "cuda",
        "--dynamic-resolution": args.dynamic_resolution,
        "--bf16 or --fp16": args.bf16 or args.fp16,
        "layers of Transformer Engine": args.transformer_impl != "local",
        "a run without --deterministic-mode": not args.deterministic_mode,
        f"heads of another width than {width}": flash.takes_width(width),
        f"flash-attn-4 {flash.VERSION}, which is not installed": flash.is_installed(),
    }
    return next((need for need, is_met in needs.items() if not is_met), None)


def set_macro_batch(args: Namespace, layouts: Layouts) -> None:
    """Choose how many microbatches a colocated encoder encodes at once, unless an option does."""
    if args.encoder_macro_batch is None:
        fastest = fastest_macro_batch(layouts)
        takes_fastest = args.device == "cuda" and not graphs_overlap(args, layouts, fastest)
        args.encoder_macro_batch = fastest if takes_fastest else 1


def fastest_macro_batch(layouts: Layouts) -> int:
    """Return how many microbatches GPUs encode at once by default."""
    is_free = not layouts.non_colocated and layouts.language.pp == 1
    return min(FASTEST, layouts.num_microbatches) if is_free else 1


def graphs_overlap(args: Namespace, layouts: Layouts, at_once: int) -> bool:
    """Return whether CUDA graphs would overwrite memory that others of a step still need.

    Without a pipeline, the language model's graphs are those of a step's first microbatch. Graphs
    of a last, smaller macro-batch would take memory that was free after it, but is used again when
    they are replayed.
    """
    has_graphs = args.cuda_graph_impl == "local" and have_equal_images(args)
    count = layouts.num_microbatches
    return has_graphs and layouts.language.pp == 1 and count > at_once and count % at_once > 0


def set_experts(args: Namespace, preset: VLMPreset, layouts: Layouts) -> None:
    """Choose how tokens reach their experts and what CUDA graphs have of MoE layers, if not given.

    Where it was measured to be faster, token counts stay on the device, and graphs have whole MoE
    layers. Elsewhere the host asks for the counts, and graphs have the routers alone.
    """
    has_graphs, asked = args.cuda_graph_impl == "local", args.cuda_graph_modules
    # Modules on ranks of their own exchange rows of any length, for which Megatron takes alltoall.
    # With ep, each rank gathers the tokens of all EP ranks: measured with graphs and ep=2 alone.
    language = layouts.language
    is_near = not layouts.non_colocated and language.etp == 1 and language.ep <= 1 + has_graphs
    is_fast = args.device == "cuda" and args.bf16 and is_near
    # Experts with adapters are Megatron's own, which have no FP8.
    is_fast = is_fast and (args.lora_dim or LANGUAGE not in parts_in_fp8(args, preset))
    chosen = {  # what the configuration will have under these names
        "moe_token_dispatcher_type": "allgather",
        "gated_linear_unit": args.swiglu or args.quick_geglu,
        "quant_recipe": args.te_precision_config_file,
        "recompute_modules": args.recompute_modules or (),
    }
    is_fast = is_fast and counts_stay_on_device(Namespace(**vars(args) | chosen))
    is_fast = is_fast and not args.moe_shared_expert_overlap  # which is alltoall's
    if has_graphs:
        others = args.recompute_granularity or CudaGraphModule.moe_router in (asked or ())
        is_fast = is_fast and not others
    if args.moe_token_dispatcher_type is None:
        args.moe_token_dispatcher_type = "allgather" if is_fast else "alltoall"
    if has_graphs and not asked:
        is_whole = is_fast and args.moe_token_dispatcher_type == "allgather"
        experts = CudaGraphModule.moe if is_whole else CudaGraphModule.moe_router
        # In packed rows attention has other shapes each time.
        args.cuda_graph_modules = [] if args.pack else [CudaGraphModule.attn]
        args.cuda_graph_modules.append(CudaGraphModule.mamba)
        args.cuda_graph_modules += [experts] if args.num_experts else []
