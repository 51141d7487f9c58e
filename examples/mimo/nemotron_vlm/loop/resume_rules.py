# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of options with which a run does not go on: refused before anything is loaded.

docs/user/checkpoints.md has the table of all changes.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields

import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import option_of
from examples.mimo.nemotron_vlm.data import PREPARATION
from examples.mimo.nemotron_vlm.loop.terminal import changes
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset
from megatron.core.dist_checkpointing.safe_loading import SafeReader
from megatron.core.transformer.transformer_config import TransformerConfig

STREAM = ("data", "seed", "seq_length", "pack", "pack_window", "sample_multiple", *PREPARATION)
"""Arguments that may change which sample has which number, for the refusal's text; whether it has
changed is decided by the fingerprint of the data."""

MODEL = (
    *dict.fromkeys(
        own.name for kind in (LanguagePreset, TransformerConfig) for own in fields(kind)
    ),
    *("squared_relu", "swiglu", "quick_geglu", "openai_gelu", "position_embedding_type"),
    *("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "mscale"),
    *("rotary_scaling_factor", "mscale_all_dim", "yarn_original_max_position_embeddings"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int"),
    *("untie_embeddings_and_output_weights", "encoder_sizes"),
)
"""Arguments that decide what the model computes, except `FREE`. Several change no weight's shape,
so that the weights would load, and others would only lack a part."""

FREE = re.compile(
    r"""
    (tensor|expert_(model|tensor)|pipeline|virtual|context|sequence_parallel|linear_cp|attention_cp|
    cp_comm|microbatch|account_for).* |  # layout
    (fp16|bf16|params_dtype|fp8|fp4|first_last|num_layers_at|deterministic|attention_softmax|
    disable_bf16|fp32_residual|moe_router_dtype|mamba_training|init_method|use_cpu_init).* |
    (hidden|attention)_dropout | moe_(aux|z)_loss_coeff | moe_input_jitter_eps | mtp_loss.* |
    moe_router_(load_balancing_type|bias_update|force).* |  # training
    (tp_comm|cross_entropy|overlap|ep_|cpu_|wgrad|gradient_acc|variable_seq|use_ring|fine_|offload|
    min_off|delta_off|activation_off|recompute|distribute|barrier|flash|attention_backend|fused_|
    transformer_impl|use_(te|fused|kitchen|transformer_engine|mamba_mem)|kitchen|clone|batch_inv|
    inference|test_mode|high_prio).* |
    .*(fusion|cuda_graph|shared_expert_overlap).* |
    moe_.*(dispatcher|grouped|single_|deepep|hybridep|ncclep|logging|recompute|replay|padding).*
    """,
    re.VERBOSE,
)
"""Settings of layers that may change when a run goes on."""

STATE = ("use_distributed_optimizer", "fp16")
"""Arguments that decide the form of the optimizer's state."""

OF_PARTS = ("encoder_lr", "projector_lr", "encoder_weight_decay", "projector_weight_decay")
"""Arguments that give parts parameter groups of their own, each with its rates."""


LORA = ("lora_dim", "lora_alpha", "lora_rs", "lora_target_modules", "train_parts")
"""Arguments that decide what adapters are."""


def check_resume(args: Namespace, saved: Namespace | None) -> None:
    """Check that a run can go on where the saved run stood.

    Args:
        saved: the arguments in the checkpoint; None skips the checks.

    Raises:
        UserError: data, model or the optimizer's state are others.
    """
    if saved is None:
        return
    _check_data(args, saved)
    if model := _changes(args, saved, [name for name in MODEL if not FREE.fullmatch(name)]):
        raise UserError(
            f"--load {args.load}: another model was saved there ({model}); give what was given "
            "then, or --finetune, which takes the weights if all fit, and begins anew"
        )
    why = None
    if state := _changes(args, saved, STATE):
        why = f"has another form ({state}): give what was given then"
    elif getattr(saved, "no_save_optim", False):
        why = "was left out by --no-save-optim"
    elif _has_half_weights(saved):
        why = "has half of each master weight, from an earlier version"
    if why and not args.no_load_optim:
        raise UserError(
            f"--load {args.load}: the optimizer's state there {why}; --no-load-optim goes on with "
            "a new optimizer"
        )
    given = [bool(getattr(args, name)) for name in OF_PARTS]
    if args.use_checkpoint_opt_param_scheduler and given != [
        bool(getattr(saved, name, None)) for name in OF_PARTS
    ]:
        raise UserError(
            f"--load {args.load}: --use-checkpoint-opt_param-scheduler takes the saved rates, and "
            f"other parts had rates of their own ({_changes(args, saved, OF_PARTS)}); give what "
            "was given then, or leave that option out"
        )
    now = _frozen(args)
    if untrained := [word for word in _frozen(saved) if not {word, word.split(":")[-1]} & now]:
        raise UserError(
            f"--load {args.load}: {', '.join(sorted(untrained))} was frozen in that run, and "
            "has no optimizer state; freeze it, or give --finetune, which takes the weights and "
            "begins anew"
        )


def check_adapters(args: Namespace, saved: Namespace | None, directory: str) -> None:
    """Check that a checkpoint has what this run's model lacks: a whole model, or its adapters.

    Raises:
        UserError: it has the other, or adapters of another form or another base.
    """
    has, wants = getattr(saved, "lora_dim", 0), args.lora_dim
    if wants and not has:
        raise UserError(
            f"{directory} has a whole model: give it as --pretrained-checkpoint; --load takes "
            "the adapters of a run with --lora-dim"
        )
    if has and not wants:
        raise UserError(
            f"{directory} has adapters alone, which go on with --lora-dim {has} and the base as "
            "--pretrained-checkpoint"
        )
    if has and (others := changes(args, saved, LORA)):
        raise UserError(f"{directory} has other adapters ({others}); give what was given then")
    if has and saved.lora_base not in (None, args.lora_base):  # peft does not name its base
        raise UserError(
            f"{directory} has adapters of another base: its checksum is {saved.lora_base}, and "
            f"--pretrained-checkpoint {args.pretrained_checkpoint} has {args.lora_base}"
        )


def check_vocabulary(args: Namespace, saved: Namespace | None, directory: str) -> None:
    """Check that weights are for as many words: Megatron would cut off rows, or fill in zeros.

    A converted checkpoint has no arguments, and no padding.

    Raises:
        UserError: the numbers differ.
    """
    words = getattr(saved, "vocab_size", None)
    if words is None:
        stored = SafeReader(directory).read_metadata().state_dict_metadata
        words = stored["language_model.module.embedding.word_embeddings.weight"].size[0]
    if words != args.vocab_size:
        raise UserError(
            f"{directory} has a vocabulary of {words}: --vocab-size must be {words}, not "
            f"{args.vocab_size}"
        )


def _check_data(args: Namespace, saved: Namespace) -> None:
    """Check that the data is the stream of samples that the saved run left, wherever it lies."""
    if getattr(saved, "data_fingerprint", args.data_fingerprint) == args.data_fingerprint:
        return
    others = [
        f"{option_of(name)} {getattr(args, name)} in place of {getattr(saved, name, None)}"
        for name in STREAM
        if getattr(args, name) != getattr(saved, name, None)
    ]
    raise UserError(
        f"--load {args.load}: {args.data} has other samples than when this was saved, or another "
        f"order of them ({', '.join(others) or 'with the same options'}), so that the run cannot "
        "go on where it stood; give what was given then, or --finetune, which takes the weights "
        "and begins anew"
    )


def _has_half_weights(saved: Namespace) -> bool:
    """Return whether master weights are what bf16 weights lack, which PyTorch would load as them.

    Runs that have ``store_param_remainders`` among their arguments save whole ones.
    """
    is_aware = getattr(saved, "use_precision_aware_optimizer", False)
    is_aware = is_aware and not saved.optimizer_cpu_offload
    in_bf16 = getattr(saved, "bf16", False) and not hasattr(saved, "store_param_remainders")
    return bool(is_aware and in_bf16 and saved.main_params_dtype == torch.float32)


def _changes(args: Namespace, saved: Namespace, names: Sequence[str]) -> str:
    """Return the arguments of the checkpoint that differ now, but not where stages begin."""
    now, then = (
        {**vars(each), **_sizes(each), "hybrid_layer_pattern": _layers(each)}
        for each in (args, saved)
    )
    sizes = _sizes(args) | _sizes(saved) if "encoder_sizes" in names and _sizes(saved) else ()
    known = [name for name in names if name in then and name != "encoder_sizes"]
    return changes(Namespace(**now), Namespace(**then), [*known, *sizes])


def _sizes(args: Namespace) -> dict[str, object]:
    """Return the sizes of encoders, as ``NAME.SIZE``; none of a run from before they were saved."""
    encoders = getattr(args, "encoder_sizes", {}).items()
    return {f"{name}.{size}": n for name, sizes in encoders for size, n in sizes.items()}


def _layers(args: Namespace) -> str:
    return (getattr(args, "hybrid_layer_pattern", None) or "").replace("|", "")


def _frozen(args: Namespace) -> set[str]:
    return {part.strip() for part in getattr(args, "freeze", "").split(",") if part.strip()}
