# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stop load balancing in the routers of a frozen model."""

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter


def freeze_routers(model: MegatronModule) -> None:
    """Stop routers from balancing their experts' loads, by losses and by the expert bias.

    The balancing and z losses of a frozen router would still send gradients through the frozen
    layers to the modules that make the model's inputs. The expert bias is a buffer, so
    ``requires_grad`` does not stop its updates.

    Args:
        model: a model whose layers are all frozen; their configurations are changed.
    """
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router.frozen_expert_bias = True
            coefficients = router.config.moe_aux_loss_coeff
            is_list = isinstance(coefficients, list)
            router.config.moe_aux_loss_coeff = [0.0] * len(coefficients) if is_list else 0.0
            router.config.moe_z_loss_coeff = None
