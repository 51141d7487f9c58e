# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the model: freezing them, and their own learning rates and weight decays.

Options name them ``encoder``, ``projector`` and ``language``; the first two are those of all
encoders, or with ``NAME:`` before them of one.
"""

import itertools
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import option_of
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.lora import is_adapter
from megatron.core.transformer.moe.layout_free_router import freeze_routers

NAMES = {"encoder": "*encoders.*", "projector": "*input_projections.*"}
"""Parameter name patterns of an encoder's parts."""

ModelPart = tuple[str, str]
"""Name of an encoder's module, and a part of it; the language model's is ``LANGUAGE``."""

LANGUAGE: ModelPart = ("", "language")


@dataclass(frozen=True)
class PartSettings:
    """The settings of parts that the options ask for.

    frozen: parts that are not trained. overrides: learning rates and weight decays of others, by
    module, for Megatron's optimizer.
    """

    frozen: frozenset[ModelPart]
    overrides: dict[str, dict[ParamKey, ParamGroupOverride]] = field(default_factory=dict)


def part_settings(args: Namespace, names: list[str]) -> PartSettings:
    """Read the options of parts.

    A part's learning rate follows the common schedule, with the same ratio of minimum to maximum.

    Raises:
        UserError: there is no such part, nothing is left to train, or a rate is no number of 0 or
            more.
    """
    settings, adapted = PartSettings(_frozen(args, names)), adapted_parts(args, names)
    for part, kind in itertools.product(NAMES, ("lr", "weight_decay")):
        argument = f"{part}_{kind}"
        option = option_of(argument)
        for name, text in by_encoder(option, getattr(args, argument), names).items():
            value = _rate(option, text)
            if (name, part) in settings.frozen - adapted:
                cause = (
                    f"--lora-dim {args.lora_dim}" if args.lora_dim else f"--freeze {args.freeze}"
                )
                raise UserError(f"{option} does nothing with {cause}")
            of_module = settings.overrides.setdefault(name, {})
            override = of_module.setdefault(ParamKey(name=NAMES[part]), {})
            if kind == "lr":
                least = args.min_lr * value / args.lr if args.lr else 0.0
                override |= {"max_lr": value, "min_lr": least}
            else:
                override |= {"start_wd": value, "end_wd": value}
    return settings


def adapted_parts(args: Namespace, names: list[str]) -> frozenset[ModelPart]:
    """Return the parts in which ``--lora-target-modules`` looks for layers, with LoRA.

    Raises:
        UserError: a word names no encoder of the model.
    """
    words = args.lora_target_modules.split(",") if args.lora_dim else ()
    modules = {word.rpartition(":")[0] for word in words} - {""}
    if unknown := modules - {*names}:
        known = ", ".join(f"{name}:" for name in names)
        raise UserError(
            f"--lora-target-modules {unknown.pop()}: no such encoder; choose from {known}, or "
            "leave it out for the language model"
        )
    own = {LANGUAGE} if any(":" not in word for word in words) else set()
    return frozenset({(module, "encoder") for module in modules} | own)


def _frozen(args: Namespace, names: list[str]) -> frozenset[ModelPart]:
    every = [*itertools.product(names, NAMES), LANGUAGE]
    if args.lora_dim:
        return frozenset(every) - parts_named("--train-parts", args.train_parts, every)
    frozen = parts_named("--freeze", args.freeze, every)
    if frozen == {*every}:
        raise UserError("--freeze leaves nothing to train; leave out one of its parts")
    return frozen


def parts_named(option: str, text: str, every: Sequence[ModelPart]) -> frozenset[ModelPart]:
    """Return the parts that an option's comma-separated words name, each with ``NAME:`` or without.

    Raises:
        UserError: a word is none of ``every`` part.
    """
    found: set[ModelPart] = set()
    for word in text.split(",") if text else ():
        module, _, part = word.rpartition(":")
        named = {each for each in every if each[1] == part and module in ("", each[0])}
        if not named:
            known = list(dict.fromkeys(part for _, part in every))
            several = len({module for module, _ in every if module}) > 1
            known += [f"{module}:{part}" for module, part in every if module and several]
            raise UserError(f"{option} {word}: no such part; choose from {', '.join(known)}")
        found |= named
    return frozenset(found)


def _rate(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0.0:
        raise UserError(f"{option} must be 0 or more, not {text}")
    return value


def by_encoder(option: str, given: Sequence[str] | None, names: Sequence[str]) -> dict[str, str]:
    """Return what an option says for each encoder; of several values for all, the last counts.

    Raises:
        UserError: an encoder is unknown, or given twice.
    """
    common: dict[str, str] = {}
    found: dict[str, str] = {}
    for word in given or ():
        name, colon, value = word.rpartition(":")
        if not colon:
            common = dict.fromkeys(names, value)
        elif name not in names:
            raise UserError(f"{option} {word}: no such encoder; choose from {', '.join(names)}")
        elif name in found:
            raise UserError(f"{option} {word}: {name} is given twice; give each encoder once")
        else:
            found[name] = value
    return common | found


def part_of(name: str) -> ModelPart:
    """Return the part that a parameter of the bare model belongs to."""
    if not name.startswith("modality_submodules."):
        return LANGUAGE
    return name.split(".")[1], "projector" if ".input_projections." in name else "encoder"


def freeze(stages: list[MimoModel], parts: Collection[ModelPart]) -> None:
    """Freeze the parameters of ``parts``, but not their adapters; call it before DDP wraps the
    modules."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if part_of(name) in parts and not is_adapter(name):
                parameter.requires_grad_(False)
        if LANGUAGE in parts:
            freeze_routers(stage)
