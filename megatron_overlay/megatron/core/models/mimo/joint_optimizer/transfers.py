# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Move gradients from DDP's buffers to an optimizer's shards, and weights back, all at once.

Upstream slices the buffers for each parameter at each step, and copies weights one by one: the host
needs about 20 µs for a parameter, and the device has nothing to do. The buffers stay where they
are, so the first step notes the slices, and later steps use them.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.models.mimo.joint_optimizer.gradients import gradients_of
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def keep_slices(leaf: MegatronOptimizer) -> None:
    """Let a distributed optimizer keep its slices, unless transfers are more than copies.

    They are where weights are quantized, and where gradients are cast to fp32.
    """
    if type(leaf) is not DistributedOptimizer or leaf.is_stub_optimizer:
        return
    config, is_aware = leaf.ddp_config, leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    casts = any(buffer.grad_dtype != torch.float32 for buffer in leaf.buffers) and not is_aware
    if not (
        casts or config.use_megatron_fsdp or config.fp8_param_gather or config.fp4_param_gather
    ):
        leaf.__class__ = _KeptSlices


class _KeptSlices(DistributedOptimizer):
    """A distributed optimizer after its first step."""

    _gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None
    _weights: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def _copy_model_grads_to_main_grads(self) -> None:
        if self._gradients is None:
            super()._copy_model_grads_to_main_grads()
            self._gradients = gradients_of(self)
            return
        is_aware = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        name = "decoupled_grad" if is_aware else "grad"
        for parameter, gradient in self._gradients:
            setattr(parameter, name, gradient)

    def _copy_main_params_to_model_params(self) -> None:
        if self._weights is None:
            with _NotedCopies() as noted:
                super()._copy_main_params_to_model_params()
            self._weights = noted.copies
        elif self._weights:
            torch._foreach_copy_(*map(list, zip(*self._weights, strict=True)))


class _NotedCopies(TorchDispatchMode):
    """Notes the destination and the source of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.copies.append(args[:2])
        return func(*args, **(kwargs or {}))
