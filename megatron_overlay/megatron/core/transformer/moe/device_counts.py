# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""MoE layers whose host never asks the device how many tokens each expert has.

Upstream's dispatchers copy these counts to the host, which sizes buffers by them, so that each
layer waits for the device. Here buffers have sizes that the host knows: k rows for each token,
where k experts take it. All tokens of the expert ranks are gathered; rows that go to experts of
other ranks are a tail that the grouped GEMMs leave out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


def has_right_grouped_gemm() -> bool:
    """Return whether PyTorch's grouped GEMM is right for experts without tokens, and never waits.

    Of GPUs, only Hopper's are known to have one; where there is no GPU to ask, it is taken to be.
    """
    generation, _ = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return hasattr(F, "grouped_mm") and generation in (0, 9)  # 0 under the CPU runtime


def counts_stay_on_device(config: TransformerConfig) -> bool:
    """Return whether MoE layers of this configuration keep token counts on the device.

    They do with the all-gather dispatcher and ``moe_grouped_gemm``, for experts that grouped GEMMs
    of PyTorch compute: without biases, gates, weight gradients that wait, and recompute or
    offloading within experts. With ``fp8`` these GEMMs stay in 16 bits. Other configurations have
    upstream's dispatchers.
    """
    in_experts = config.fine_grained_activation_offloading or (
        config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
    )
    return (
        config.moe_token_dispatcher_type == "allgather"
        and config.moe_grouped_gemm
        and has_right_grouped_gemm()
        and config.moe_expert_capacity_factor is None
        and not (config.add_bias_linear or config.gated_linear_unit)
        and not (config.fp4 or config.quant_recipe)
        and not (in_experts or config.use_transformer_engine_op_fuser)
        and not config.overlap_dispatch_backward_with_experts_wgrad
    )


class DeviceCountDispatcher(MoEAllGatherTokenDispatcher):
    """Upstream's all-gather dispatcher, with buffers of sizes that the host knows."""

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Order the gathered tokens by this rank's experts.

        Args:
            hidden_states: ``[T, H]``, tokens of all expert ranks.
            probs: ``[T, E]``, weights of the experts; of other experts than a token's, zero.

        Returns:
            ``[T·min(k, e), H]`` for k experts a token and e experts on this rank: rows of the last
            expert first, as DDP's buffers have the weights, then a tail without meaning; the
            experts' counts ``[e]`` in this order, on the device; and the rows' weights
            ``[T·min(k, e)]``.
        """
        own = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map = self.routing_map[:, own].flip(1)
        rows, self.local_probs, self.reversed_local_input_permutation_mapping, _, _ = permute(
            hidden_states,
            self.local_map,
            probs=probs[:, own].flip(1),
            num_out_tokens=len(hidden_states) * min(self.router_topk, self.num_local_experts),
            fused=self.config.moe_permute_fusion,
        )
        self.routing_map = None
        return rows, self.local_map.sum(dim=0), self.local_probs

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sum the expert ranks' outputs ``[T, H]``; each rank takes its own tokens.

        Upstream sums in the precision of the probabilities. Of two ranks a sum is rounded once in
        any precision, so it takes half of the bytes in that of the outputs.
        """
        if self.tp_ep_group.size() != 2:
            return super().token_combine(hidden_states)
        return reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)


class DeviceCountMoELayer(MoELayer):
    """Upstream's MoE layer; where it can, it keeps token counts on the device."""

    def __init__(self, config: TransformerConfig, *args, pg_collection, **kwargs) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        if counts_stay_on_device(config):
            indices = self.local_expert_indices
            self.token_dispatcher = DeviceCountDispatcher(
                self.num_local_experts, indices, config=config, pg_collection=pg_collection
            )
