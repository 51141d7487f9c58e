# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Balancing losses with per-token loss: in layouts of four ranks as on one rank, and frozen."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.layout_free_router import LayoutFreeRouter, freeze_routers
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils, requires_world_size

WORLD = 4
HIDDEN, EXPERTS, LENGTH = 16, 8, 24
REAL_TOKENS = (24, 19, 6, 23)
"""Number of real tokens of each sample; padding follows them."""


def whole_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [S, B, H] and the padding mask [S, B]."""
    rng = torch.Generator().manual_seed(5)
    hidden = torch.randn(LENGTH, len(REAL_TOKENS), HIDDEN, generator=rng)
    mask = torch.arange(LENGTH)[:, None] >= torch.tensor(REAL_TOKENS)
    return hidden.to(Utils.device), mask.to(Utils.device)


config_of = partial(
    TransformerConfig,
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    num_moe_experts=EXPERTS,
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_dtype="fp32",
    calculate_per_token_loss=True,
    perform_initialization=False,
    add_bias_linear=False,
)


def router_of(groups: ProcessGroupCollection, balancing: str) -> LayoutFreeRouter:
    config = config_of(moe_router_load_balancing_type=balancing, moe_aux_loss_coeff=1.0)
    router = LayoutFreeRouter(config, pg_collection=groups)
    router.set_layer_number(1)
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(6))
    router.weight.data.copy_(weight)
    return router.to(Utils.device)


def balance(
    router: LayoutFreeRouter, hidden: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the balancing loss's gradient of the weight, and the number of tokens per expert."""
    probs, _ = router(hidden, mask)
    (probs * 0).sum().backward()
    return router.weight.grad, router.local_tokens_per_expert


@pytest.fixture
def alone():
    """Groups of one rank."""
    Utils.initialize_distributed()
    with Utils.group_of_first_ranks(1) as group:
        yield ProcessGroupCollection(**dict.fromkeys(("tp", "cp", "tp_cp", "tp_dp_cp"), group))


@requires_world_size(1)
@pytest.mark.parametrize("losses", ["aux_loss", ["seq_aux_loss", "aux_loss"], "z_loss"])
@pytest.mark.parametrize("frozen", [True, False])
def test_inputs_get_gradients_of_balancing_losses_from_trained_routers_only(alone, losses, frozen):
    router = router_of(alone, "aux_loss")
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


@requires_world_size(WORLD)
class TestBalancingLosses:
    @pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
    @pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4), (1, 2), (2, 1), (1, 1)])
    @pytest.mark.parametrize("padded", [True, False])
    def test_are_those_of_one_rank(self, balancing, tp, cp, padded):
        """A batch without padding has no mask, and the router gets its counts as integers."""
        Utils.initialize_distributed()
        dp = WORLD // (tp * cp)
        grid = HyperCommGrid([tp, cp, dp, 1], ["tp", "cp", "dp", "pp"])
        groups = ProcessGroupCollection.from_hyper_comm_grid(grid)
        alone = ProcessGroupCollection(
            **dict.fromkeys(("tp", "cp", "tp_cp", "tp_dp_cp"), groups.pp)
        )

        hidden, mask = whole_batch()
        mask &= padded
        samples = hidden.chunk(dp, dim=1)[groups.dp.rank()].contiguous()
        padding = mask.chunk(dp, dim=1)[groups.dp.rank()]
        found = balance(
            router_of(groups, balancing),
            samples.chunk(tp * cp)[groups.tp_cp.rank()],
            padding.chunk(tp * cp)[groups.tp_cp.rank()] if padding.any() else None,
        )
        for part in found:
            dist.all_reduce(part)  # over DP and CP as gradients are, over TP as the sequence is cut
        # A microbatch of a DP rank has a loss of its own, unless it is global.
        parts = 1 if balancing == "global_aux_loss" else dp
        runs = [
            balance(router_of(alone, balancing), rows.contiguous(), padding)
            for rows, padding in zip(hidden.chunk(parts, 1), mask.chunk(parts, 1), strict=True)
        ]
        expected = [torch.stack(part).sum(0) for part in zip(*runs, strict=True)]
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
        grid.destroy()
