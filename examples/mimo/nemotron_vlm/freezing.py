# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the model that are not trained."""

from __future__ import annotations

from torch import nn

from examples.mimo.nemotron_vlm.model import IMAGES
from megatron.core.models.mimo.model.base import MimoModel


def freeze(stages: list[MimoModel], parts: list[str]) -> None:
    """Take the parameters of ``parts`` out of training, before DDP wraps the modules.

    Args:
        stages: the bare model's virtual stages on this rank.
        parts: of encoder, projector, language.
    """
    for stage in stages:
        for part in parts:
            for module in _modules(stage, part):
                module.requires_grad_(False)
                for router in module.modules():
                    if hasattr(router, "expert_bias"):
                        router.frozen_expert_bias = True


def _modules(stage: MimoModel, part: str) -> list[nn.Module]:
    if part == "language":
        return [] if stage.language_model is None else [stage.language_model]
    if IMAGES not in stage.modality_submodules:
        return []
    images = stage.modality_submodules[IMAGES]
    return [images.encoders if part == "encoder" else images.input_projections]
