# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the model: freezing them, and their own learning rates and weight decays.

Options name them ``encoder``, ``projector`` and ``language``; the first two are those of all
encoders, or with ``NAME:`` before them of one.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.named_values import by_encoder
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.moe.frozen_routers import freeze_routers

NAMES = {"encoder": "*encoders.*", "projector": "*input_projections.*"}
"""Parameter name patterns of the parts that may have their own learning rate and weight decay."""

Part = tuple[str, str]
"""Name of an encoder's module, and a part of it; the language model's is ``LANGUAGE``."""

LANGUAGE: Part = ("", "language")


def part_of(name: str) -> Part:
    """Return the part that a parameter of the bare model belongs to."""
    if not name.startswith("modality_submodules."):
        return LANGUAGE
    return name.split(".")[1], "projector" if ".input_projections." in name else "encoder"


@dataclass(frozen=True)
class PartSettings:
    """What options say of parts.

    frozen: parts that are not trained. rates: own learning rate and weight decay of others; None
    where the common one holds.
    """

    frozen: frozenset[Part]
    rates: Mapping[Part, tuple[float | None, float | None]]


def part_settings(args: Namespace, preset: VLMPreset) -> PartSettings:
    """Read the options of parts.

    Raises:
        UserError: there is no such part, nothing is left to train, or a rate is none.
    """
    names = preset.names
    frozen, every = set(), {*itertools.product(names, NAMES), LANGUAGE}
    for word in args.freeze.split(",") if args.freeze else ():
        module, _, part = word.rpartition(":")
        named = {each for each in every if each[1] == part and module in ("", each[0])}
        if not named:
            known = [*NAMES, LANGUAGE[1]]
            known += [f"{name}:{part}" for name in names for part in NAMES] * (len(names) > 1)
            raise UserError(f"--freeze {word}: no such part; choose from {', '.join(known)}")
        frozen |= named
    if frozen == every:
        raise UserError("--freeze leaves nothing to train; leave out one of its parts")
    found = {}
    for part in NAMES:
        lr, decay = (_rates(args, part, kind, names, frozen) for kind in ("lr", "weight_decay"))
        found |= {(name, part): (lr.get(name), decay.get(name)) for name in names}
    return PartSettings(frozenset(frozen), found)


def _rates(
    args: Namespace, part: str, kind: str, names: list[str], frozen: set[Part]
) -> dict[str, float]:
    """Return what an option of a part says for each encoder that it names."""
    option = f"--{part}-{kind.replace('_', '-')}"
    given = by_encoder(option, getattr(args, f"{part}_{kind}"), names)
    found = dict.fromkeys(names, given.pop("")) | given if "" in given else given
    rates = {}
    for name, text in found.items():
        try:
            rates[name] = float(text)
        except ValueError:
            raise UserError(f"{option} {text}: not a number") from None
        if not rates[name] >= 0.0:
            raise UserError(f"{option} must be 0 or more")
        if (name, part) in frozen:
            raise UserError(f"{option} does nothing with --freeze {args.freeze}")
    return rates


def freeze(stages: list[MimoModel], parts: Collection[Part]) -> None:
    """Freeze the parameters of ``parts``; call it before DDP wraps the modules.

    Args:
        stages: the bare model's virtual stages on this rank.
        parts: the frozen parts.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if part_of(name) in parts:
                parameter.requires_grad_(False)
        if LANGUAGE in parts:
            freeze_routers(stage)


def part_overrides(
    args: Namespace, settings: PartSettings
) -> dict[str, dict[ParamKey, ParamGroupOverride]]:
    """Return the parts' learning rates and weight decays, by module, for Megatron's optimizer.

    A part's learning rate follows the common schedule, with the same ratio of minimum to maximum.
    """
    found: dict[str, dict[ParamKey, ParamGroupOverride]] = {}
    for (module, part), (lr, decay) in settings.rates.items():
        override: ParamGroupOverride = {}
        if lr is not None:
            override |= {"max_lr": lr, "min_lr": args.min_lr * lr / args.lr if args.lr else 0.0}
        if decay is not None:
            override |= {"start_wd": decay, "end_wd": decay}
        if override:
            found.setdefault(module, {})[ParamKey(name=NAMES[part])] = override
    return found
