# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layer specs that the model is built from."""

import pytest

from examples.mimo.nemotron_vlm.model.layer_specs import layer_specs
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.silu_gated_delta_net import SiluGatedDeltaNet
from megatron.core.transformer.moe.layout_free_router import LayoutFreeRouter
from megatron.core.transformer.moe.router import TopKRouter


def delta_net(stack) -> type:
    return stack.submodules.gdn_layer.submodules.self_attention.module


def router(stack) -> type:
    return stack.submodules.moe_layer.submodules.mlp.keywords["submodules"].router


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_routers_balance_alike_in_every_layout_and_delta_nets_have_their_own_activation(
    implementation,
):
    """The MLPs of this model have a squared ReLU; upstream's own spec stays as it is."""
    stack = layer_specs(implementation).hybrid_stack
    assert (router(stack), delta_net(stack)) == (LayoutFreeRouter, SiluGatedDeltaNet)
    assert (router(hybrid_stack_spec), delta_net(hybrid_stack_spec)) == (TopKRouter, GatedDeltaNet)
