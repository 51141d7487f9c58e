# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A frozen router's balance does nothing to the inputs of its model."""

import pytest

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.frozen_routers import freeze_routers
from tests.unit_tests.test_utilities import Utils, requires_world_size
from tests.unit_tests.transformer.moe.test_layout_free_router import router_of, whole_batch


@requires_world_size(1)
@pytest.mark.parametrize("losses", ["aux_loss", ["seq_aux_loss", "aux_loss"], "z_loss"])
@pytest.mark.parametrize("frozen", [True, False])
def test_inputs_get_gradients_of_balancing_losses_from_trained_routers_only(losses, frozen):
    Utils.initialize_distributed()
    grid = HyperCommGrid([1, 1, 1, 1], ["tp", "cp", "dp", "pp"])
    router = router_of(ProcessGroupCollection.from_hyper_comm_grid(grid), "aux_loss")
    config = router.config
    config.moe_aux_loss_coeff = [1.0] * len(losses) if isinstance(losses, list) else 1.0
    if losses == "z_loss":
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = 0.0, 1.0
    else:
        router.routing_type = losses
    router.requires_grad_(False)
    if frozen:
        freeze_routers(router)
    hidden, _ = whole_batch()
    probs, _ = router(hidden.requires_grad_())
    (probs * 0).sum().backward()
    assert bool(hidden.grad.any()) == (not frozen)
    assert router.frozen_expert_bias == frozen
    grid.destroy()
