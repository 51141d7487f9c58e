# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer of a module's dense or expert parameters.

Upstream slices DDP's buffers for each parameter at each step, and copies weights one by one, while
the device waits for the host. The buffers stay where they are, so the first step notes the slices,
and later steps use them. Transformer Engine's FusedAdam makes fp32 copies of 16-bit state for all
parameters of a group before it steps the first: of two moments 8 bytes a parameter, more than fp32
moments would add. So it steps some parameters at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.models.mimo.joint_optimizer.gradients import gradient_name, gradients_of
from megatron.core.models.mimo.joint_optimizer.shards import param_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOST = 2**27
"""Elements of a part: 1 GiB of copies of two moments."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations and sources."""


class LeafOptimizer(DistributedOptimizer):
    """Upstream's distributed optimizer, with transfers at once, steps in parts, and own shards."""

    _gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None
    _weights: list[Copies] | None = None

    @property
    def keeps_slices(self) -> bool:
        """Whether transfers are only copies: weights are not quantized, nor gradients cast."""
        is_aware = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        casts = any(buffer.grad_dtype != torch.float32 for buffer in self.buffers) and not is_aware
        return not (casts or self.ddp_config.fp8_param_gather or self.ddp_config.fp4_param_gather)

    def _copy_model_grads_to_main_grads(self) -> None:
        if self._gradients is None or not self.keeps_slices:
            super()._copy_model_grads_to_main_grads()
            self._gradients = gradients_of(self) if self.keeps_slices else None
            return
        name = gradient_name(self)
        for parameter, gradient in self._gradients:
            setattr(parameter, name, gradient)

    def _copy_main_params_to_model_params(self) -> None:
        if not self.keeps_slices:
            super()._copy_main_params_to_model_params()
            return
        if self._weights is None:
            with _NotedCopies() as noted:
                super()._copy_main_params_to_model_params()
            self._weights = _by_type(noted.copies)
            return
        for destinations, sources in self._weights:
            torch._foreach_copy_(destinations, sources)

    def step_with_ready_grads(self) -> bool:
        """Step, in parts unless all state is fp32; return True."""
        config, inner = self.config, self.optimizer
        types = {config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype}
        if types != {torch.float32} and not config.optimizer_cpu_offload:
            self.optimizer = StepsInParts(inner, MOST)
        try:
            return super().step_with_ready_grads()
        finally:
            self.optimizer = inner

    def sharded_param_state_fs_model_space(
        self,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        metadata: dict | None = None,
    ) -> dict[int, dict[str, ShardedTensorFactory]]:
        """Return the state as boxes of parameters, in place of a format that Megatron has dropped.

        Files are those of Megatron's fully reshardable format.
        """
        return param_state(self, model_sharded_state_dict, is_loading)


class StepsInParts:
    """An optimizer that steps parts of its groups one after the other.

    A part has at most ``most`` elements, or one parameter. All parts of a group have the group's
    settings and number of steps.
    """

    def __init__(self, inner: torch.optim.Optimizer, most: int) -> None:
        self._inner, self._most = inner, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self) -> None:
        """Step all parts."""
        groups = self._inner.param_groups
        try:
            for group in groups:
                part = group
                for parameters in _parts(group["params"], self._most):
                    part = {**group, "params": parameters}
                    self._inner.param_groups = [part]
                    self._inner.step()
                group |= {**part, "params": group["params"]}
        finally:
            self._inner.param_groups = groups


def _parts(parameters: list[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    part, size = [], 0
    for parameter in parameters:
        if part and size + parameter.numel() > most:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += parameter.numel()
    if part:
        yield part


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
