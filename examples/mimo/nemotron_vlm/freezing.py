# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the model that are not trained."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from examples.mimo.nemotron_vlm.model import IMAGES
from megatron.core.models.mimo.model.base import MimoModel


def freeze(stages: list[MimoModel], parts: tuple[str, ...]) -> None:
    """Take the parameters of ``parts`` out of training, before DDP wraps the modules.

    Args:
        stages: the bare model's virtual stages on this rank.
        parts: of encoder, projector, language.
    """
    for stage in stages:
        for part in parts:
            for module in _modules(stage, part):
                module.requires_grad_(False)


def is_trained(module: nn.Module) -> bool:
    """Whether any parameter of the module is trained, on any stage of its pipeline; collective."""
    is_here = any(parameter.requires_grad for parameter in module.parameters())
    everywhere = [is_here] * module.pg_collection.pp.size()
    dist.all_gather_object(everywhere, is_here, group=module.pg_collection.pp)
    return any(everywhere)


def _modules(stage: MimoModel, part: str) -> list[nn.Module]:
    if part == "language":
        return [] if stage.language_model is None else [stage.language_model]
    if IMAGES not in stage.modality_submodules:
        return []
    images = stage.modality_submodules[IMAGES]
    return [images.encoders if part == "encoder" else images.input_projections]
