# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers with adapters (`lora.py`), in any model.

A layer of all experts of a rank has one pair of matrices, with a first axis of experts. With a pair
for each expert, thousands of small gradients would keep the host busy for longer than the GPU.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.lora import Adapter, LoRA, is_adapter, parallel_mode


class ExpertAdapter(Adapter):
    """The adapters of a layer of all experts of a rank: A ``[experts, r, in]``, B ``[experts, out,
    r]``. Checkpoints have each expert's A and B at its place in tensors of all experts.

    Args:
        layers: the layer of each expert, called ``name`` there.
        experts: the module of all of them.
    """

    def __init__(
        self, layers: Sequence[nn.Module], settings: LoRA, experts: nn.Module, name: str
    ) -> None:
        super().__init__(layers[0], settings, experts, name, (len(layers),))

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple, metadata: dict[str, Any]
    ) -> ShardedStateDict:
        """Return A and B as parts of all experts'; gates are divided apart from what they gate."""
        (experts,), axes = self._owner, len(sharded_offsets)
        of_experts = (axes, experts.ep_group.rank(), experts.ep_group.size())
        rank, ranks = self.group.rank(), self.group.size()

        def factory(key: str, matrix: Tensor) -> ShardedTensorFactory:
            axis = getattr(matrix, "partition_dim", None)
            count = 1 + (axis == 1 and experts.config.gated_linear_unit)

            def build(key: str, matrix: Tensor, replica: tuple, _) -> list[ShardedTensor]:
                parts = []
                for number, data in enumerate(matrix.chunk(count, 1)):
                    offsets = [*sharded_offsets, of_experts]
                    if axis is not None:
                        offsets.append((axes + axis, number * ranks + rank, count * ranks))
                    named = {"replica_id": replica, "prepend_axis_num": axes}
                    parts.append(ShardedTensor.from_rank_offsets(key, data, *offsets, **named))
                return parts

            replica = (0, rank if axis is None else 0, experts.dp_group.rank())
            merge = functools.partial(torch.cat, dim=1)
            return ShardedTensorFactory(key, matrix, build, merge, replica)

        matrices = self.state_dict(keep_vars=True).items()
        return {f"{prefix}{name}": factory(f"{prefix}{name}", each) for name, each in matrices}


@dataclass(frozen=True)
class _OfOneExpert:
    """The adapter of one expert, for experts that are computed one after the other."""

    every: ExpertAdapter
    place: int

    def __call__(self, rows: Tensor) -> Tensor:
        first, second = (each[self.place] for each in self.every.weights())
        hidden = F.linear(self.every.dropped(rows), first) * self.every.settings.scale
        return F.linear(hidden, second)


class _Adapted:
    """Mixed into the class of a linear layer that has an ``adapter``."""

    def forward(self, rows: Tensor, *args, **named):
        result = super().forward(rows, *args, **named)
        if isinstance(result, Tensor):  # PyTorch's own layer
            return result + self.adapter(rows)
        output, *others = result
        if getattr(self, "return_layernorm_output", False):  # a norm is fused with the layer
            if isinstance(output, tuple):
                output, rows = output
            else:
                rows = others.pop()
        return (output + self.adapter(rows), *others)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if isinstance(self.adapter, Adapter):
            state |= self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
        return state


class _AdaptedExperts:
    """Mixed into the class of experts that have ``adapters``, by the name of their layer."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, adapter in self.adapters.items():
            own = f"{prefix}adapters.{name}.", f"{prefix}experts.{name}.adapter."
            parts = adapter.sharded_state_dict(own[0], sharded_offsets, metadata)
            replace_prefix_for_sharding(parts, *own)  # the keys of one expert
            state |= parts
        return state


@functools.cache
def _adapted(kind: type[nn.Module], how: type) -> type[nn.Module]:
    return type(f"Adapted{kind.__name__}", (how, kind), {})


def add_adapters(model: nn.Module, settings: LoRA, names: Sequence[str]) -> None:
    """Adapt linear layers of a bare model, in place.

    Names of the base's parameters stay as they are. The layers' class becomes one that adds the
    adapter, as PyTorch's parametrizations do.

    Args:
        names: of the layers, which :func:`linear_layers` returns.
    """
    of_experts: dict[tuple[str, str], list[nn.Module]] = defaultdict(list)
    for name in names:
        place, _, own = name.rpartition(".")
        owner = model.get_submodule(place)
        base = getattr(owner, own)
        experts, expert, _ = place.partition(".local_experts.")
        if expert:
            of_experts[experts, own].append(base)
        else:
            base.adapter = Adapter(base, settings, owner, own)
        base.__class__ = _adapted(type(base), _Adapted)
        if hasattr(base, "return_layernorm_output"):
            base.return_layernorm_output = True
    for (place, own), layers in of_experts.items():
        experts = model.get_submodule(place)
        every = ExpertAdapter(layers, settings, experts, own)
        for number, layer in enumerate(layers):
            layer.adapter = _OfOneExpert(every, number)
        if not isinstance(experts, _AdaptedExperts):
            experts.__class__ = _adapted(type(experts), _AdaptedExperts)
            experts.adapters = nn.ModuleDict()
        experts.adapters[own] = every


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the linear layers of a model that can be adapted, with their names."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or parallel_mode(module)) and not is_adapter(name)
    ]


def require_input_gradients(stack: nn.Module) -> None:
    """Let the input of a stack of layers require a gradient.

    With everything before the stack frozen it would not, and a layer that Megatron recomputes has
    gradients only if its input has one; a pipeline's stage needs one, too.
    """

    def hook(_module: nn.Module, args: tuple, named: dict) -> None:
        for value in itertools.chain(args[:1], [named.get("hidden_states")]):
            if isinstance(value, Tensor) and torch.is_grad_enabled() and not value.requires_grad:
                value.requires_grad_()

    stack.register_forward_pre_hook(hook, with_kwargs=True)
