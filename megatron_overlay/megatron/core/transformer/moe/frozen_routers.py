# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Routers of a model that is not trained."""

from __future__ import annotations

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter


def freeze_routers(model: MegatronModule) -> None:
    """Let routers balance nothing any more: a frozen model's experts stay as they are used.

    Balancing and z losses of a frozen router would go on through the frozen layers, and train what
    the model's inputs come from. The expert bias is a buffer, which ``requires_grad`` does not
    stop.

    Args:
        model: all of whose layers are frozen; their configurations change.
    """
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router.frozen_expert_bias = True
            coefficients = router.config.moe_aux_loss_coeff
            is_list = isinstance(coefficients, list)
            router.config.moe_aux_loss_coeff = [0.0] * len(coefficients) if is_list else 0.0
            router.config.moe_z_loss_coeff = None
