# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of the expert-DP group for modules whose grid has no expert view."""

import torch.distributed as dist


def expert_dp_group_without_view(config, dp_cp_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return ``dp_cp_group``, which DDP uses for expert-DP if the collection has no ``expt_dp``.

    DDP only reads its size, as a dense model has no expert parameters, so no group need be made.

    Raises:
        ValueError: a MoE model on more than one tensor or expert rank, which needs expert groups.
    """
    sizes = (
        config.tensor_model_parallel_size,
        config.expert_model_parallel_size,
        config.expert_tensor_parallel_size,
    )
    if config.num_moe_experts and max(sizes) > 1:
        raise ValueError(
            f"{config.num_moe_experts} experts with tp={config.tensor_model_parallel_size}, "
            f"ep={config.expert_model_parallel_size}, etp={config.expert_tensor_parallel_size} "
            f"need expert groups, but expt_dp is None: register a view along expt_tp, ep, expt_dp "
            f"on the module's grid"
        )
    return dp_cp_group
