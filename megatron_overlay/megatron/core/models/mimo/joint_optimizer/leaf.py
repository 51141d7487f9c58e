# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer of a module's dense or expert parameters.

Upstream slices DDP's buffers for each parameter at each step, and copies weights one by one, while
the device waits for the host. The buffers stay where they are, so the first step notes the slices,
and later steps use them.

The precision-aware optimizer may have its state on the host, and keep half of each master weight.
Checkpoints have whole master weights, so that any run can load them; a save makes them one by one,
and writes other state as it is. Transformer Engine's ``state_dict`` and ``load_state_dict`` would
make fp32 copies of all state on the device at once.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.mimo.joint_optimizer.gradients import gradient_name, gradients_of
from megatron.core.models.mimo.joint_optimizer.remainders import (
    Masters,
    keeps_halves,
    split_masters,
)
from megatron.core.models.mimo.joint_optimizer.shards import param_state, shards_of
from megatron.core.models.mimo.joint_optimizer.state import leaves
from megatron.core.models.mimo.joint_optimizer.steps_in_parts import StepsInParts
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.process_groups_config import ProcessGroupCollection

MOST = 2**30
"""Bytes of a part's state: allocations of pinned memory are rounded up to powers of two."""

UNSCALED = torch.bfloat16, torch.float32
"""Types of state that has no scale, and in which state is saved."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations and sources."""


class LeafOptimizer(DistributedOptimizer):
    """Upstream's distributed optimizer, with transfers at once, and own shards."""

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

    def pieces_of(
        self, param: torch.nn.Parameter, is_loading: bool
    ) -> Iterable[dict[str, torch.Tensor]]:
        """Return the master weights ("param") and moments of this rank's shard, flat, as pieces.

        Args:
            is_loading: whether only types and sizes are needed.
        """
        return [self._get_main_param_and_optimizer_states(param)]

    def sharded_param_state_fs_model_space(
        self,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        metadata: dict | None = None,
    ) -> dict[int, dict[str, ShardedTensorFactory]]:
        """Return the state as boxes of parameters, in place of a format that Megatron has dropped.

        A checkpoint has the files of Megatron's fully reshardable format.
        """
        return param_state(self, model_sharded_state_dict, is_loading)


class PrecisionAwareLeaf(LeafOptimizer):
    """A leaf optimizer that steps in parts, for ``use_precision_aware_optimizer``."""

    @cached_property
    def _in_parts(self) -> StepsInParts:
        """The optimizer, in parts. Made late: upstream's constructor sets the parameters."""
        config = self.config
        types = [config.exp_avg_dtype, config.exp_avg_sq_dtype]
        if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            types.append(torch.int16 if config.store_param_remainders else config.main_params_dtype)
        most = MOST // sum(each.itemsize for each in types) // 128 * 128  # kernels take whole lines
        return StepsInParts(self.optimizer, most, config.optimizer_offload_fraction)

    def step_with_ready_grads(self) -> bool:
        """Step in parts; return True. RuntimeError is raised after a step that has failed."""
        inner, self.optimizer = self.optimizer, self._in_parts
        try:
            return super().step_with_ready_grads()
        finally:
            self.optimizer = inner

    def _init_optimizer_states_with_dummy_values(self) -> None:
        self._in_parts.allocate()

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
        with self._without_state():
            return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict` returns, and the parameters' state if the checkpoint has it."""
        settings = {**state_dict}
        parameters = settings.pop("param_state", None)
        with self._without_state():
            super().load_state_dict(settings)
        if parameters is None:
            return
        self._in_parts.allocate()
        self._in_parts.is_whole = False
        shards = (self._in_parts.pieces[self._stepped(param)] for param, _ in shards_of(self))
        for number, piece in enumerate(itertools.chain.from_iterable(shards)):
            self._load(piece, parameters[number])
        self._in_parts.is_whole = True

    def _stepped(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Return the shard of a parameter that the optimizer steps."""
        group, place = self.model_param_group_index_map[param]
        return self.optimizer.param_groups[group]["params"][place]

    def pieces_of(
        self, param: torch.nn.Parameter, is_loading: bool
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield pieces; tensors that have the type of checkpoints are the state itself.

        Raises:
            RuntimeError: a step or load has failed, so that there is no one state to save.
        """
        types = {k: self._get_state_key_dtype(k) for k in ("param", *self.optimizer_state_keys)}
        types = {kind: t if t in UNSCALED else torch.float32 for kind, t in types.items()}
        for piece in self._in_parts.pieces[self._stepped(param)]:
            if is_loading:
                yield {k: torch.empty_like(piece, dtype=t, device="meta") for k, t in types.items()}
            else:
                self._in_parts.check()
                yield {kind: self._saved(piece, kind) for kind in types}

    def _saved(self, piece: torch.Tensor, kind: str) -> torch.Tensor:
        name = "master_param" if kind == "param" else kind
        tensor = self.optimizer.state[piece].get(name)
        if kind == "param" and piece.dtype == torch.float32:
            return piece  # Transformer Engine's own copy keeps its first value
        if tensor.dtype == torch.int16:
            return Masters(piece, tensor)
        if type(tensor) is torch.Tensor and tensor.dtype in UNSCALED:
            return tensor
        with self._in_parts.on_device(piece):
            return self.optimizer.get_unscaled_state(piece, name).cpu()  # an fp32 copy

    def _load(self, piece: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        adam = self.optimizer
        with self._in_parts.on_device(piece):
            for kind, tensor in tensors.items():
                value = tensor.to(piece.device, torch.float32)
                if kind != "param":
                    adam.set_scaled_state(piece, kind, value)
                elif piece.dtype == torch.float32:
                    piece.copy_(value)
                else:
                    if adam.state[piece]["master_param"].dtype == torch.int16:
                        weights, value = split_masters(value)
                        piece.copy_(weights)
                    adam.set_scaled_state(piece, "master_param", value)


def module_optimizer(
    config: OptimizerConfig,
    stages: list[torch.nn.Module],
    groups: ProcessGroupCollection,
    config_overrides: dict[ParamKey, ParamGroupOverride] | None,
) -> MegatronOptimizer | None:
    """Return the optimizer of one module on its ranks; None if all of them have it frozen.

    A fully frozen module need not be wrapped in DDP.
    """
    if not isinstance(stages[0], DistributedDataParallel):
        return None
    if config.optimizer_cpu_offload and not config.use_precision_aware_optimizer:
        raise ValueError("optimizer_cpu_offload needs use_precision_aware_optimizer")
    is_aware, config = config.use_precision_aware_optimizer, copy.copy(config)
    config.store_param_remainders = keeps_halves(config)
    config.optimizer_offload_fraction *= config.optimizer_cpu_offload
    config.optimizer_cpu_offload = False  # the state is on the host, not the steps
    optimizer = get_megatron_optimizer(
        config,
        stages,
        config_overrides,
        use_gloo_process_groups=False,
        pg_collection=groups,
        distributed_optimizer=PrecisionAwareLeaf if is_aware else LeafOptimizer,
    )
    trained = [leaf for leaf in leaves(optimizer) if not leaf.is_stub_optimizer]
    return ChainedOptimizer(trained) if trained else None


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
