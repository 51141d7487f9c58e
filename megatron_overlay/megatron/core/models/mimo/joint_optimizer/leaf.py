# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer of a module's dense or expert parameters.

Upstream slices DDP's buffers for each parameter at each step, and copies weights one by one, while
the device waits for the host. The buffers stay where they are, so the first step notes the slices,
and later steps use them.

The precision-aware optimizer may have its state on the host, and keep half of each master weight.
Checkpoints have whole master weights, so that any run can load them. State is saved and loaded one
parameter at a time: Transformer Engine's ``state_dict`` and ``load_state_dict`` would make fp32
copies of all state on the device at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.models.mimo.joint_optimizer.gradients import gradient_name, gradients_of
from megatron.core.models.mimo.joint_optimizer.remainders import split_masters, whole_masters
from megatron.core.models.mimo.joint_optimizer.shards import param_state
from megatron.core.models.mimo.joint_optimizer.steps_in_parts import StepsInParts
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOST = 2**30
"""Bytes of a part's state: allocations of pinned memory are rounded up to powers of two."""

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

    @cached_property
    def _in_parts(self) -> StepsInParts:
        """The optimizer, in parts. Made late: upstream's constructor sets the parameters."""
        config = self.config
        kept = config.exp_avg_dtype.itemsize + config.exp_avg_sq_dtype.itemsize
        if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            in_halves = config.bf16 and self.optimizer.store_param_remainders
            kept += 2 if in_halves else config.main_params_dtype.itemsize
        return StepsInParts(self.optimizer, MOST // kept, config.optimizer_offload_fraction)

    def step_with_ready_grads(self) -> bool:
        """Step, in parts if state is on the host or not fp32; return True."""
        config, inner = self.config, self.optimizer
        types = {config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype}
        if types != {torch.float32} or config.optimizer_offload_fraction:
            self.optimizer = self._in_parts
        try:
            return super().step_with_ready_grads()
        finally:
            self.optimizer = inner

    def _init_optimizer_states_with_dummy_values(self) -> None:
        if self.config.use_precision_aware_optimizer:
            self._in_parts.allocate()
        else:
            super()._init_optimizer_states_with_dummy_values()

    @contextmanager
    def _without_state(self) -> Iterator[None]:
        """Hide the parameters' state from Transformer Engine's methods inside the block."""
        state = self.optimizer.state
        self.optimizer.state = {"hidden": {}}  # Megatron would allocate it if it were empty
        try:
            yield
        finally:
            self.optimizer.state = state

    def state_dict(self) -> dict:
        """Return the settings of parameter groups and the loss scale."""
        if not self.config.use_precision_aware_optimizer:
            return super().state_dict()
        with self._without_state():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict` returns, and the parameters' state if the checkpoint has it."""
        if not self.config.use_precision_aware_optimizer:
            super().load_state_dict(state_dict)
            return
        settings = {**state_dict}
        parameters = settings.pop("param_state", None)
        with self._without_state():
            super().load_state_dict(settings)
        self._in_parts.allocate()
        if parameters is not None:
            self.load_parameter_state_from_fs_model_space(parameters)

    def _stepped(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Return the shard of a parameter that the optimizer steps."""
        group, place = self.model_param_group_index_map[param]
        return self.optimizer.param_groups[group]["params"][place]

    def _get_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter
    ) -> dict[str, torch.Tensor]:
        if not self.config.use_precision_aware_optimizer:
            return super()._get_main_param_and_optimizer_states(model_param)
        stepped, adam = self._stepped(model_param), self.optimizer
        with self._in_parts.on_device(stepped):
            found = {kind: adam.get_unscaled_state(stepped, kind) for kind in adam.state[stepped]}
            master = found.pop("master_param", stepped)
            if stepped.dtype == torch.float32:
                master = stepped  # Transformer Engine's own copy keeps its first value
            elif master.dtype == torch.int16:
                master = whole_masters(stepped, master)
            for kind, tensor in found.items():
                if self._get_state_key_dtype(kind) == torch.bfloat16:
                    found[kind] = tensor.bfloat16()
            # The writing process copies state of the device, which need not pass /dev/shm.
            to = "cpu" if self.config.optimizer_offload_fraction else stepped.device
            return {kind: tensor.to(to) for kind, tensor in {**found, "param": master}.items()}

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
    ) -> None:
        if not self.config.use_precision_aware_optimizer:
            super()._set_main_param_and_optimizer_states(model_param, tensors)
            return
        stepped, adam = self._stepped(model_param), self.optimizer
        found = {kind: tensor.to(stepped.device, torch.float32) for kind, tensor in tensors.items()}
        master, kept = found.pop("param"), adam.state[stepped].get("master_param")
        with self._in_parts.on_device(stepped):
            if stepped.dtype == torch.float32:
                stepped.copy_(master)
            else:
                if kept.dtype == torch.int16:
                    weights, master = split_masters(master)
                    stepped.copy_(weights)
                adam.set_scaled_state(stepped, "master_param", master)
            for kind, tensor in found.items():
                adam.set_scaled_state(stepped, kind, tensor)

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
