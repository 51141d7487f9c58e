# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Learning rates and weight decay of the encoder and the projector, where they have their own."""

from __future__ import annotations

from argparse import Namespace

from examples.mimo.nemotron_vlm.own_options import PARTS_OF_IMAGES
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

NAMES = dict(zip(PARTS_OF_IMAGES, ("*encoders.*", "*input_projections.*"), strict=True))
"""Of a part's parameters."""


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
