# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Move gradients from DDP's buffers to an optimizer's shards, and weights back, all at once.

Upstream slices the buffers for each parameter at each step, and copies weights one by one, while
the device waits for the host. The buffers stay where they are, so the first step notes the slices,
and later steps use them.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.models.mimo.joint_optimizer.gradients import gradient_name, gradients_of
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations and sources."""


def keep_slices(leaf: MegatronOptimizer) -> None:
    """Let a distributed optimizer keep its slices, unless transfers are more than copies.

    They are where weights are quantized, and where gradients are cast to fp32.
    """
    if type(leaf) is not DistributedOptimizer or leaf.is_stub_optimizer:
        return
    is_aware = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    casts = any(buffer.grad_dtype != torch.float32 for buffer in leaf.buffers) and not is_aware
    if not (casts or leaf.ddp_config.fp8_param_gather or leaf.ddp_config.fp4_param_gather):
        leaf.__class__ = _KeptSlices


class _KeptSlices(DistributedOptimizer):
    """A distributed optimizer after its first step."""

    _gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None
    _weights: list[Copies] | None = None

    def _copy_model_grads_to_main_grads(self) -> None:
        if self._gradients is None:
            super()._copy_model_grads_to_main_grads()
            self._gradients = gradients_of(self)
            return
        name = gradient_name(self)
        for parameter, gradient in self._gradients:
            setattr(parameter, name, gradient)

    def _copy_main_params_to_model_params(self) -> None:
        if self._weights is None:
            with _NotedCopies() as noted:
                super()._copy_main_params_to_model_params()
            self._weights = _by_type(noted.copies)
            return
        for destinations, sources in self._weights:
            torch._foreach_copy_(destinations, sources)


def _by_type(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Copies]:
    """Divide copies by the type of the destination, and leave out those of a tensor to itself.

    PyTorch's fused kernel writes all destinations in the type of the first before 2.11; later
    versions then copy one by one. Of fp32 parameters, the shard is the slice itself.
    """
    found: dict[torch.dtype, Copies] = {}
    for destination, source in copies:
        if destination.data_ptr() != source.data_ptr():
            destinations, sources = found.setdefault(destination.dtype, ([], []))
            destinations.append(destination)
            sources.append(source)
    return list(found.values())


class _NotedCopies(TorchDispatchMode):
    """Notes the destination and the source of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.copies.append(args[:2])
        return func(*args, **(kwargs or {}))
