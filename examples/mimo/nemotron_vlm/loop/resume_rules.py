# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of options with which a run does not go on: refused before anything is loaded.

docs/user/checkpoints.md has the table of all changes.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields

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
    "untie_embeddings_and_output_weights",
)
"""Arguments that decide what the language model computes, except `FREE`. Several change no weight's
shape, so that the weights would load, and others would only lack a part."""

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

STATE = ("use_distributed_optimizer", "fp16", "store_param_remainders")
"""Arguments that decide the form of the optimizer's state; the last one says that it has whole
master weights."""

OF_PARTS = ("encoder_lr", "projector_lr", "encoder_weight_decay", "projector_weight_decay")
"""Arguments that give parts parameter groups of their own, each with its rates."""

GIVE = "give what was given then"
ANEW = "--finetune, which takes the weights and begins anew"
"""Cures of a refusal."""

LORA = ("lora_dim", "lora_alpha", "lora_rs", "lora_target_modules", "train_parts")
"""Arguments that decide what adapters are."""


def check_resume(args: Namespace, saved: Namespace | None) -> None:
    """Check that a run can go on where the saved run stood.

    Args:
        saved: the arguments in the checkpoint; None skips the checks.

    Raises:
        UserError: data, model or the optimizer's state are others.
    """
    for hindrance in _hindrances(args, saved) if saved else ():
        raise UserError(f"--load {args.load}: {hindrance}")


def _hindrances(args: Namespace, saved: Namespace) -> Iterator[str]:
    """Yield why a run cannot go on, in the order of the checks."""
    # The data may lie elsewhere: only its stream of samples counts.
    if getattr(saved, "data_fingerprint", args.data_fingerprint) != args.data_fingerprint:
        others = [
            f"{option_of(name)} {getattr(args, name)} in place of {getattr(saved, name, None)}"
            for name in STREAM
            if getattr(args, name) != getattr(saved, name, None)
        ]
        yield (
            f"{args.data} has other samples than when this was saved, or another order of them "
            f"({', '.join(others) or 'with the same options'}), so that the run cannot go on where "
            f"it stood; {GIVE}, or {ANEW}"
        )
    if model := _changes_of_model(args, saved):
        yield (
            f"another model was saved there ({model}); {GIVE}, or --finetune, which takes the "
            "weights if all fit, and begins anew"
        )
    why = None
    if state := changes(args, saved, STATE):
        why = f"has another form ({state}): {GIVE}"
    elif getattr(saved, "no_save_optim", False):
        why = "was left out by --no-save-optim"
    if why and not args.no_load_optim:
        yield f"the optimizer's state there {why}; --no-load-optim goes on with a new optimizer"
    now, then = ([bool(getattr(each, name, None)) for name in OF_PARTS] for each in (args, saved))
    if args.use_checkpoint_opt_param_scheduler and now != then:
        yield (
            "--use-checkpoint-opt_param-scheduler takes the saved rates, and other parts had rates "
            f"of their own ({changes(args, saved, OF_PARTS)}); {GIVE}, or leave that option out"
        )
    frozen = _frozen(args)
    if untrained := [one for one in _frozen(saved) if not {one, one.split(":")[-1]} & frozen]:
        yield (
            f"{', '.join(sorted(untrained))} was frozen in that run, and has no optimizer state; "
            f"freeze it, or give {ANEW}"
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
        raise UserError(f"{directory} has other adapters ({others}); {GIVE}")
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


def _changes_of_model(args: Namespace, saved: Namespace) -> str:
    """Return the saved settings of layers and sizes of encoders that differ now; stages may."""
    now, then = (
        vars(each)
        | {f"{name}.{size}": n for name, of in encoders.items() for size, n in of.items()}
        | {
            "hybrid_layer_pattern": (getattr(each, "hybrid_layer_pattern", "") or "").replace(
                "|", ""
            )
        }
        for each in (args, saved)
        for encoders in [getattr(each, "encoder_sizes", {})]  # not in a run from before it
    )
    sizes = [name for name in now | then if "." in name] * hasattr(saved, "encoder_sizes")
    settings = [name for name in MODEL if name in then and not FREE.fullmatch(name)]
    return changes(Namespace(**now), Namespace(**then), [*settings, *sizes])


def _frozen(args: Namespace) -> set[str]:
    return {part.strip() for part in getattr(args, "freeze", "").split(",") if part.strip()}
