# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Experts built from Megatron's own layers and computed by grouped GEMMs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.moe.experts import SequentialMLP


class GroupedExperts(SequentialMLP):
    """Computes all local experts at once with ``moe_grouped_gemm``, else one after the other.

    Parameters, and so checkpoints, are those of SequentialMLP. PyTorch's grouped GEMM reads the
    experts' token counts on the device, so nothing here waits for the device.

    Raises:
        ValueError: with ``moe_grouped_gemm``, experts have biases or gated units, or PyTorch is
            older than 2.10, which adds the general grouped GEMM.
    """

    def __init__(self, num_local_experts: int, config, *args, **kwargs) -> None:
        if config.moe_grouped_gemm and (config.add_bias_linear or config.gated_linear_unit):
            raise ValueError(
                "moe_grouped_gemm of local layers takes no biases and no gated units: "
                "leave it out, or choose transformer_impl='transformer_engine'"
            )
        if config.moe_grouped_gemm and not hasattr(F, "grouped_mm"):
            raise ValueError("moe_grouped_gemm of local layers needs PyTorch 2.10 or newer")
        super().__init__(num_local_experts, config, *args, **kwargs)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Apply each expert to its tokens.

        Args:
            permuted_local_hidden_states: ``[tokens, H]``, ordered by expert.
            tokens_per_expert: ``[experts]``, integers.
            permuted_probs: ``[tokens]``, weights of the experts' activations.

        Returns:
            ``[tokens, H]``, partial sums over the experts' tensor-parallel ranks; and no bias.
        """
        hidden = permuted_local_hidden_states
        if not self.config.moe_grouped_gemm or self.num_local_experts == 1 or not len(hidden):
            return super().forward(hidden, tokens_per_expert, permuted_probs)
        if self.config.moe_apply_probs_on_input:
            hidden = (permuted_probs.unsqueeze(-1) * hidden).to(hidden.dtype)
            permuted_probs = torch.ones_like(permuted_probs)
        ends = tokens_per_expert.to(hidden.device).cumsum(0, dtype=torch.int32)
        inner = F.grouped_mm(hidden, self._transposed_weights("linear_fc1"), offs=ends)
        inner = self.config.activation_func(inner)
        inner = (inner * permuted_probs.unsqueeze(-1)).to(inner.dtype)
        return F.grouped_mm(inner, self._transposed_weights("linear_fc2"), offs=ends), None

    def _transposed_weights(self, layer: str) -> Tensor:
        weights = [_weight(getattr(expert, layer)) for expert in self.local_experts]
        return torch.stack(weights).transpose(1, 2)


def _weight(layer: torch.nn.Module) -> Tensor:
    """A layer's weight after its forward pre-hooks, which wait for DDP's parameter gather."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())
    return layer.weight


def with_grouped_experts(moe: partial) -> partial:
    """The MoE layer builder of upstream's local spec, with :class:`GroupedExperts`."""
    submodules = moe.keywords["submodules"]
    experts = partial(GroupedExperts, **submodules.experts.keywords)
    return partial(moe, submodules=replace(submodules, experts=experts))
