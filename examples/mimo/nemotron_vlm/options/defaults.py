# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""This program's defaults of Megatron's options: the model's, and those that a first run needs."""

from argparse import Namespace
from dataclasses import asdict
from importlib.util import find_spec
from signal import SIGTERM

import torch

from examples.mimo.common.allocator import has_expandable_segments
from examples.mimo.common.layout import SIZES
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from megatron.core.tensor_parallel import layers

MODEL = {
    "normalization": "RMSNorm",
    "squared_relu": True,
    "add_bias_linear": False,
    "group_query_attention": True,
    "position_embedding_type": "none",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
    "moe_token_dispatcher_type": None,  # follows from the layout
    "make_vocab_size_divisible_by": 1,
}
"""Defaults that all presets share, by the names of Megatron's arguments."""

TRAINING = {
    "micro_batch_size": 4,
    "lr": 2e-3,
    "min_lr": 0.0,
    "lr_decay_style": "cosine",
    "weight_decay": 0.01,
    "init_method_std": None,
    "adam_beta2": 0.95,
    "adam_eps": 1e-5,
    "eval_iters": 0,
    "save_interval": 500,
    "async_strategy": "mcore",  # the other one waits for ever where a writer has died
    "save_tokenizer_assets": False,  # upstream's main saves those of the tokenizer that it loads
    "calculate_per_token_loss": True,
    "use_distributed_optimizer": True,
    "linear_cp_mode": "chunkwise",
    "linear_cp_layout": None,
    "dist_ckpt_optim_fully_reshardable": True,
    "verify_integrity": True,
    "use_gloo_process_groups": False,
    "override_opt_param_scheduler": True,
}

WITHOUT_KERNELS = {
    "num_workers": 0,
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}
"""Defaults on CPUs: no GPU kernels, and no loading processes, as ranks share the cores."""

WITH_ENGINE = {
    "transformer_impl": "transformer_engine",
    "moe_router_fusion": True,
    "moe_permute_fusion": True,
    "use_fused_weighted_squared_relu": True,
}
"""Defaults on GPUs with Transformer Engine."""


def defaults(preset: VLMPreset, device: str, packs: bool) -> dict[str, object]:
    """Return the defaults of a preset on a device, by the names of Megatron's arguments.

    Args:
        packs: whether several samples are packed into a row, which then is a microbatch.
    """
    left_open = dict.fromkeys(SIZES["language"].values())  # None, so that --language can set them
    chosen = {**MODEL, **asdict(preset.language), **TRAINING, **left_open}
    chosen["seq_length"] = preset.seq_length
    if packs:
        chosen["micro_batch_size"] = 1
    if device == "cpu":
        return chosen | WITHOUT_KERNELS
    has_engine = find_spec("transformer_engine") is not None
    # --moe-grouped-gemm needs an A100 or newer, and Transformer Engine or PyTorch's grouped_mm.
    has_grouped_gemm = has_engine or hasattr(torch.nn.functional, "grouped_mm")
    is_recent = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    chosen |= WITH_ENGINE if has_engine else {"transformer_impl": "local"}
    return chosen | {
        "async_save": None,  # follows from other options
        "gradient_accumulation_fusion": layers._grad_accum_fusion_available,
        "moe_grouped_gemm": has_grouped_gemm and is_recent,
        "cross_entropy_loss_fusion": None,  # follows from other options
        "overlap_grad_reduce": None,  # follows from other options
        "overlap_param_gather": None,  # follows from other options
    }


def saves_asynchronously(args: Namespace) -> bool:
    """Return whether saves are asynchronous unless an option says otherwise.

    The process that writes them reads the tensors from the GPU's memory, in which PyTorch shares
    no expandable segments on every machine. Training would change those that are on the host.
    """
    is_ended = args.exit_signal_handler and args.exit_signal == SIGTERM  # the process that writes
    is_unsafe = is_ended or args.optimizer_cpu_offload or has_expandable_segments()
    return bool(args.device == "cuda" and args.save and not args.skip_train and not is_unsafe)
