# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of options with which a run does not go on: refused before anything is loaded.

docs/user/checkpoints.md has the table of all changes.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch.distributed.checkpoint import FileSystemReader

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import option_of
from examples.mimo.nemotron_vlm.data import PREPARATION
from examples.mimo.nemotron_vlm.loop.terminal import changes
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset

STREAM = ("data", "seed", "seq_length", "pack", "pack_window", "sample_multiple", *PREPARATION)
"""Arguments that may change which sample has which number, for the refusal's text; whether it has
changed is decided by the fingerprint of the data."""

MODEL = (
    *(field.name for field in fields(LanguagePreset)),
    *("normalization", "squared_relu", "swiglu", "add_bias_linear", "position_embedding_type"),
    *("rotary_base", "rotary_percent", "untie_embeddings_and_output_weights"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_shared_expert_gate"),
)
"""Arguments that decide what the language model computes. Several change no weight's shape, so that
the weights would load, and others would only lack a part."""

STATE = ("use_distributed_optimizer", "fp16")
"""Arguments that decide the form of the optimizer's state."""

OF_PARTS = ("encoder_lr", "projector_lr", "encoder_weight_decay", "projector_weight_decay")
"""Arguments that give parts parameter groups of their own, each with its rates."""


EMBEDDING = "language_model.module.embedding.word_embeddings.weight"
"""Key of the input embeddings in a checkpoint, ``[vocabulary, hidden]``."""


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
    if model := _changes(args, saved, MODEL):
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


def check_vocabulary(args: Namespace, saved: Namespace | None, directory: str) -> None:
    """Check that a checkpoint's weights are for as many words, also where only they are taken.

    Megatron cuts off other rows, or fills them with zeros, as the vocabulary's padding may differ.

    Args:
        saved: the arguments in the checkpoint; None of a converted one, which has no padding.

    Raises:
        UserError: the numbers differ.
    """
    words = getattr(saved, "vocab_size", None)
    if words is None:
        stored = FileSystemReader(directory).read_metadata().state_dict_metadata
        words = stored[EMBEDDING].size[0] if EMBEDDING in stored else args.vocab_size
    if words != args.vocab_size:
        raise UserError(
            f"{directory} has a vocabulary of {words}, and --vocab-size is {args.vocab_size}: "
            f"give --vocab-size {words}"
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

    Runs of this version save whole ones, and say so in ``store_param_remainders``.
    """
    is_aware = getattr(saved, "use_precision_aware_optimizer", False)
    is_aware = is_aware and not saved.optimizer_cpu_offload
    in_bf16 = getattr(saved, "bf16", False) and getattr(saved, "store_param_remainders", True)
    return bool(is_aware and in_bf16 and saved.main_params_dtype == torch.float32)


def _changes(args: Namespace, saved: Namespace, names: Sequence[str]) -> str:
    """Return the arguments of the checkpoint that differ now, but not where stages begin."""
    known = [name for name in names if hasattr(saved, name)]
    plain = [
        Namespace(**vars(each) | {"hybrid_layer_pattern": _layers(each)}) for each in (args, saved)
    ]
    return changes(plain[0], plain[1], known)


def _layers(args: Namespace) -> str:
    return (getattr(args, "hybrid_layer_pattern", None) or "").replace("|", "")


def _frozen(args: Namespace) -> set[str]:
    return {part.strip() for part in getattr(args, "freeze", "").split(",") if part.strip()}
