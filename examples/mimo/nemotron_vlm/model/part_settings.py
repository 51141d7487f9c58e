# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the model: freezing them, and their own learning rates and weight decays."""

from __future__ import annotations

from argparse import Namespace

from examples.mimo.nemotron_vlm.model.model import IMAGES
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.moe.frozen_routers import freeze_routers

PARTS = ("encoder", "projector", "language")
"""Names of the parts, for ``--freeze``."""

NAMES = {"encoder": "*encoders.*", "projector": "*input_projections.*"}
"""Parameter name patterns of the parts that may have their own learning rate and weight decay."""


def part_of(name: str) -> str:
    """Return the part, one of ``PARTS``, that a parameter of the bare model belongs to."""
    if not name.startswith(f"modality_submodules.{IMAGES}."):
        return "language"
    return "projector" if ".input_projections." in name else "encoder"


def freeze(stages: list[MimoModel], parts: list[str]) -> None:
    """Freeze the parameters of ``parts``; call it before DDP wraps the modules.

    Args:
        stages: the bare model's virtual stages on this rank.
        parts: names from ``PARTS``.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if part_of(name) in parts:
                parameter.requires_grad_(False)
        if "language" in parts:
            freeze_routers(stage)


def part_overrides(args: Namespace) -> dict[ParamKey, ParamGroupOverride]:
    """Return the parts' learning rates and weight decays as overrides for Megatron's optimizer.

    A part's learning rate follows the common schedule, with the same ratio of minimum to maximum.
    """
    found = {}
    for part, names in NAMES.items():
        lr, decay = getattr(args, f"{part}_lr"), getattr(args, f"{part}_weight_decay")
        override: ParamGroupOverride = {}
        if lr is not None:
            override |= {"max_lr": lr, "min_lr": args.min_lr * lr / args.lr if args.lr else 0.0}
        if decay is not None:
            override |= {"start_wd": decay, "end_wd": decay}
        if override:
            found[ParamKey(name=names)] = override
    return found
