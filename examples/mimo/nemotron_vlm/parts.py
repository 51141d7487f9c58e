# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the model: which are trained, and which at a rate of their own."""

from __future__ import annotations

from argparse import Namespace

from examples.mimo.nemotron_vlm.model import IMAGES
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.moe.frozen_routers import freeze_routers

PARTS = ("encoder", "projector", "language")
"""As ``--freeze`` names them."""

NAMES = {"encoder": "*encoders.*", "projector": "*input_projections.*"}
"""Of the parameters of the parts that may have a learning rate and weight decay of their own."""


def part_of(name: str) -> str:
    """Which of ``PARTS`` has a parameter of the bare model."""
    if not name.startswith(f"modality_submodules.{IMAGES}."):
        return "language"
    return "projector" if ".input_projections." in name else "encoder"


def freeze(stages: list[MimoModel], parts: list[str]) -> None:
    """Take the parameters of ``parts`` out of training, before DDP wraps the modules.

    Args:
        stages: the bare model's virtual stages on this rank.
        parts: of ``PARTS``.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if part_of(name) in parts:
                parameter.requires_grad_(False)
        if "language" in parts:
            freeze_routers(stage)


def part_overrides(args: Namespace) -> dict[ParamKey, ParamGroupOverride]:
    """What differs from ``--lr`` and ``--weight-decay``, for Megatron's optimizer.

    A part's learning rate has the schedule of the others, and ends at the same share of itself.
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
