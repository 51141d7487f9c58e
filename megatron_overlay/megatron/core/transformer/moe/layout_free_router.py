# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Routers whose balancing losses and expert bias do not depend on the layout, or are off.

Two exceptions remain: ``aux_loss`` is computed for a DP rank's microbatch, and the mean load in
``global_aux_loss`` depends on how many samples all DP ranks process at once.
"""

import torch

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter


class LayoutFreeRouter(TopKRouter):
    """Upstream's router, for batches whose padding lies unevenly on the ranks.

    With per-token loss, a balancing loss is weighted by the number of real tokens of the group over
    which it is computed: a TP·CP group for ``aux_loss`` and ``seq_aux_loss``, and the DP ranks as
    well for ``global_aux_loss``, which upstream divides by the number of DP ranks once more. With
    padding, upstream weights all three losses TP·CP times too much.

    The expert bias ignores padding; upstream fails to do so.
    """

    def attach_and_log_load_balancing_loss(
        self,
        activation,
        aux_loss_coeff,
        aux_loss,
        aux_loss_name,
        reduce_group,
        needs_dp_avg=True,
        valid_token_count=None,
    ):
        """Attach the loss as upstream does, weighted by the group's number of real tokens.

        ``valid_token_count`` is an int, this rank's count, without padding. With padding it is a
        tensor that upstream has summed in place, and so the group's count.
        """
        total = valid_token_count
        if not isinstance(total, torch.Tensor):
            total *= reduce_group.size()
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss,
            aux_loss_name,
            reduce_group,
            needs_dp_avg,
            total / self.tp_cp_group.size(),
        )

    def _apply_global_aux_loss(self, probs, scores, routing_map, with_padding_mask=False):
        # With a mask on every rank, as DP ranks need not all have padding.
        return super()._apply_global_aux_loss(probs, scores, routing_map, with_padding_mask=True)

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        super()._apply_expert_bias(routing_map)


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
