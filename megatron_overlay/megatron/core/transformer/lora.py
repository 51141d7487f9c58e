# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of linear layers (arXiv 2106.09685), for any tensor and expert parallelism.

An adapted layer returns ``base(x) + scale · B · A · dropout(x)``. A ``[r, in]`` and B ``[out, r]``
are divided over tensor parallelism as the base's weight ``[out, in]`` is: of a column-parallel base
B is divided, of a row-parallel one A. The other matrix is whole on every rank.

Dense layers send rows of width r. With sequence parallelism each rank's whole matrix sees its own
tokens alone, and Megatron sums its gradient, as that of norms, by the parameter's attribute
``sequence_parallel``. Without it every rank has the whole gradient. Routed experts send no rows, as
their dispatcher gathers inputs and sums outputs: there the gradient of the whole matrix is summed
in its backward.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

MAMBA_PARTS = ["z", "x", "B", "C", "dt"]
"""Names of the parts of Mamba-2's ``in_proj`` in checkpoints."""


@dataclass(frozen=True)
class LoRA:
    """Settings of adapters: their rank, the factor of their output, the dropout of their input."""

    dim: int
    scale: float
    dropout: float = 0.0


class Adapter(nn.Module):
    """The low-rank update of a linear layer; see the module's description.

    Args:
        base: the layer, whose weight is ``[out, in]`` on this rank. It is column-parallel,
            row-parallel, or has no tensor parallelism.
        owner: the module that holds the layer as ``name``. It knows which parts of the output
            checkpoints divide over tensor parallelism one by one.
        leading: sizes of axes of A and B before their own.
    """

    def __init__(
        self,
        base: nn.Module,
        settings: LoRA,
        owner: nn.Module,
        name: str,
        leading: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.settings, weight = settings, base.weight
        outputs, inputs = weight.shape
        made = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.linear_in = nn.Linear(inputs, settings.dim, **made)
        self.linear_out = nn.Linear(settings.dim, outputs, **made)
        self.mode = parallel_mode(base)
        self.is_expert = getattr(base, "is_expert", False)
        self.group = getattr(base, "tp_group", None) or getattr(base, "_tp_group", None)
        self.has_sequence = bool(getattr(base, "sequence_parallel", False)) and not self.is_expert
        self._owner, self._name = [owner], name  # a list, so that it is no submodule
        divided = {"column": (self.linear_out, 0), "row": (self.linear_in, 1)}.get(self.mode)
        for layer in (self.linear_in, self.linear_out):
            if leading:
                layer.weight = nn.Parameter(weight.new_empty(*leading, *layer.weight.shape))
            layer.weight.allreduce = getattr(weight, "allreduce", True)
            if divided and layer is divided[0]:
                axis = len(leading) + divided[1]
                set_tensor_model_parallel_attributes(layer.weight, True, axis, 1)
            else:
                layer.weight.sequence_parallel = self.has_sequence

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return A and B, once DDP has gathered them; of an expert, the backward sums the gradient
        of the whole one over the expert's tensor-parallel ranks."""
        (first,), (second,) = map(gathered_weights, (self.linear_in, self.linear_out))
        if self.is_expert and self.mode == "column":
            first = copy_to_tensor_model_parallel_region(first, group=self.group)
        if self.is_expert and self.mode == "row":
            second = copy_to_tensor_model_parallel_region(second, group=self.group)
        return first, second

    def dropped(self, rows: Tensor) -> Tensor:
        """Apply dropout; ranks that hold other tokens or features drop others.

        Tensor-parallel ranks have random states of their own. Others draw alike, so each rolls the
        features by its first tensor-parallel rank while they are dropped.
        """
        if not (self.settings.dropout and self.training):
            return rows
        is_split = self.is_expert or self.has_sequence or self.mode == "row"
        first = dist.get_process_group_ranks(self.group)[0] if self.group else dist.get_rank()
        with get_cuda_rng_tracker().fork() if is_split else nullcontext():
            dropped = F.dropout(rows.roll(-first, -1), self.settings.dropout)
        return dropped.roll(first, -1)

    def forward(self, rows: Tensor) -> Tensor:
        """Map the base's input ``[…, in]`` to the update of its output, ``[…, out]``."""
        first, second = self.weights()
        hidden = F.linear(self.dropped(rows), first) * self.settings.scale
        if self.mode and not self.is_expert:
            ways = {
                ("column", True): gather_from_sequence_parallel_region,
                ("column", False): copy_to_tensor_model_parallel_region,
                ("row", True): reduce_scatter_to_sequence_parallel_region,
                ("row", False): reduce_from_tensor_model_parallel_region,
            }
            hidden = ways[self.mode, self.has_sequence](hidden, group=self.group)
        return F.linear(hidden, second)

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple, metadata: dict[str, Any]
    ) -> ShardedStateDict:
        """Return A and B as parts of whole matrices; B is divided as the base's weight is."""
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        axes = {"column": {"linear_out.weight": 0}, "row": {"linear_in.weight": 1}}
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            axes.get(self.mode, {}),
            sharded_offsets,
            **groups,
        )
        (owner,), name = self._owner, f"{prefix}linear_out.weight"
        config = getattr(owner, "config", None)
        if self._name == "in_proj":
            mamba = getattr(owner.in_proj.weight, "partition_sizes", None)
            sizes = mamba or list(owner.in_proj_split_sections)
            names = MAMBA_PARTS if mamba else owner.in_proj_split_names
            state[name] = _split_tensor_factory(state[name], sizes, names, 0)
        elif self._name == "linear_fc1" and getattr(config, "gated_linear_unit", False):
            state[name] = apply_swiglu_sharded_factory(
                state[name],
                sharded_offsets,
                metadata.get("singleton_local_shards", False),
                tp_group=self.group,
                dp_group=metadata["dp_cp_group"],
            )
        return state


def scale_of(alpha: float, dim: int, is_rs: bool) -> float:
    """Return the factor of an adapter's output; of rsLoRA (arXiv 2312.03732) if ``is_rs``."""
    return alpha / (math.sqrt(dim) if is_rs else dim)


def is_adapter(name: str) -> bool:
    """Return whether a module or parameter of this name belongs to an adapter."""
    return ".adapter." in name or ".adapters." in name


def merged(weight: Tensor, first: Tensor, second: Tensor, scale: float) -> Tensor:
    """Return ``weight + scale · second · first``, computed in fp32, in the weight's type.

    Args:
        weight: ``[…, out, in]``. first: A, ``[…, r, in]``. second: B, ``[…, out, r]``.
    """
    update = second.float() @ first.float()
    return torch.add(weight.float(), update, alpha=scale).to(weight.dtype)


def parallel_mode(layer: nn.Module) -> str | None:
    """Return how tensor parallelism divides a layer's weight: by ``column``, ``row`` or not."""
    if isinstance(layer, ColumnParallelLinear):
        return "column"
    if isinstance(layer, RowParallelLinear):
        return "row"
    return getattr(layer, "parallel_mode", None)  # Transformer Engine's


def gathered_weights(layer: nn.Module) -> list[Tensor]:
    """Return a layer's weights; its forward pre-hooks wait for DDP's parameter gather."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())
    return list(layer.parameters(recurse=False))
