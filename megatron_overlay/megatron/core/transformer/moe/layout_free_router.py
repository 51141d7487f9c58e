# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A router whose balancing losses and expert bias are the same in every layout.

Only the mean load that ``global_aux_loss`` compares with is not: it depends on how many samples all
DP ranks take at a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from megatron.core.transformer.moe.router import TopKRouter


class LayoutFreeRouter(TopKRouter):
    """Upstream's router, for batches whose padding lies unevenly on the ranks.

    With per-token loss a balancing loss is weighed by the real tokens that it was taken over, all
    those of its group. ``aux_loss`` and ``seq_aux_loss`` belong to a TP·CP group,
    ``global_aux_loss`` to the DP ranks as well, whose number upstream divides by once more.
    Where there is padding, upstream weighs all three by TP·CP times too much.

    The expert bias leaves padding out, which fails upstream.
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
        """As upstream's. ``valid_token_count`` is this rank's; but with padding, a tensor, it is
        the group's: upstream takes it after a sum in place."""
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
        # Counted on every rank, as DP ranks need not all have padding.
        return super()._apply_global_aux_loss(probs, scores, routing_map, with_padding_mask=True)

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        super()._apply_expert_bias(routing_map)


def with_layout_free_router(moe: partial) -> partial:
    """The builder of a MoE layer, as upstream's specs have it, with this router."""
    submodules = replace(moe.keywords["submodules"], router=LayoutFreeRouter)
    return partial(moe, submodules=submodules)
