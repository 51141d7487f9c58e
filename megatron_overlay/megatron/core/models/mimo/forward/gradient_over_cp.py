# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sum over CP ranks of the gradient of encoder rows received by the language model's first stage.

All TP and CP ranks of a stage receive the same rows, and the first of them sends the gradient back.
A CP rank uses only the rows of its own tokens, so the gradients of all CP ranks must be added.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.models.mimo.config.role import ModuleLayout
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model


class _GradientToFirst(torch.autograd.Function):
    """Identity whose gradient is summed over a group onto the group's first rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.reduce(total, dist.get_global_rank(ctx.group, 0), group=ctx.group)
        return total, None


def with_whole_gradient(model: MegatronModule, rows: Tensor) -> Tensor:
    """The same rows; the rank that sends their gradient back gets the sum over all CP ranks.

    Rows of colocated modules are returned unchanged: their bridge adds the gradients up.

    Args:
        model: the MimoModel.
        rows: ``[n, H]``, the same on all TP and CP ranks of a stage.
    """
    if model.role.mode is ModuleLayout.COLOCATED:
        return rows
    groups = unwrap_model(model.language_model).pg_collection
    if groups.cp.size() == 1 or groups.tp.rank() > 0:
        return rows
    return _GradientToFirst.apply(rows, groups.cp)
