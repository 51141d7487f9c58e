# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Experts of upstream's classes, computed by PyTorch's grouped GEMMs.

These read the experts' token counts on the device, so nothing here waits for it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
from megatron.core.transformer.adapted_layers import ExpertAdapter
from megatron.core.transformer.lora import gathered_weights
from megatron.core.transformer.moe.device_counts import (
    DeviceCountMoELayer,
    counts_stay_on_device,
    has_right_grouped_gemm,
)
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.layout_free_router import LayoutFreeRouter

Computed = tuple[Tensor, None]


class GroupedExperts(SequentialMLP):
    """Computes all local experts at once with ``moe_grouped_gemm`` where PyTorch's grouped GEMM is
    right, else one after the other.

    Parameters, and so checkpoints, are those of SequentialMLP.

    Raises:
        ValueError: with ``moe_grouped_gemm``, experts have biases or gated units, or PyTorch is
            older than 2.10, which adds the general grouped GEMM.
    """

    def __init__(self, num_local_experts: int, config, *args, **kwargs) -> None:
        if config.moe_grouped_gemm and (config.add_bias_linear or config.gated_linear_unit):
            raise ValueError(
                "moe_grouped_gemm of local layers takes no biases and no gated units: "
                "leave it out, or choose transformer_impl='transformer_engine'"
            )
        if config.moe_grouped_gemm and not hasattr(F, "grouped_mm"):
            raise ValueError("moe_grouped_gemm of local layers needs PyTorch 2.10 or newer")
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.counts_stay_on_device = counts_stay_on_device(self.config)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Computed:
        """Apply each expert to its tokens, as :func:`apply_experts` does."""
        is_grouped = self.config.moe_grouped_gemm and len(hidden) > 0
        if not self.counts_stay_on_device:
            is_grouped = is_grouped and self.num_local_experts > 1 and has_right_grouped_gemm()
        if not is_grouped:
            return super().forward(hidden, tokens_per_expert, probs)
        return apply_experts(self, *self.weights(), hidden, tokens_per_expert, probs)

    def weights(self) -> list[list[Tensor]]:
        """Return the weights of both layers, in the order of the dispatcher's rows."""
        weights = [[gathered_weights(layer)[0] for layer in each] for each in self._layers()]
        # reversed once their gathers were awaited in their order
        return [each[::-1] for each in weights] if self.counts_stay_on_device else weights

    def _layers(self) -> list[list[torch.nn.Module]]:
        experts = self.local_experts
        return [[e.linear_fc1 for e in experts], [e.linear_fc2 for e in experts]]


class TEGroupedExperts(TEGroupedMLP):
    """Upstream's experts of Transformer Engine, whose own grouped GEMM takes counts of the host.

    PyTorch's grouped GEMM takes its place where token counts stay on the device. Parameters, and so
    checkpoints, are the same.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.counts_stay_on_device = counts_stay_on_device(self.config)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Computed:
        """Apply each expert to its tokens, as :func:`apply_experts` does."""
        if not self.counts_stay_on_device:
            return super().forward(hidden, tokens_per_expert, probs)
        return apply_experts(self, *self.weights(), hidden, tokens_per_expert, probs)

    def weights(self) -> list[list[Tensor]]:
        """Return the weights of both layers, in the order of the dispatcher's rows."""
        return [gathered_weights(layer)[::-1] for layer in (self.linear_fc1, self.linear_fc2)]


def lay_out_frozen_experts(model: torch.nn.Module) -> None:
    """Move the frozen weights of experts that grouped GEMMs of PyTorch multiply into one buffer for
    each layer, as DDP does with trained ones, so that no step copies them together."""
    for experts in model.modules():
        if isinstance(experts, GroupedExperts):
            is_grouped = experts.config.moe_grouped_gemm
        else:
            is_grouped = isinstance(experts, TEGroupedExperts) and experts.counts_stay_on_device
        for weights in experts.weights() if is_grouped else ():
            if all(each.data_ptr() and not each.requires_grad for each in weights):
                for weight, place in zip(weights, torch.stack(weights), strict=True):
                    weight.data = place


def apply_experts(
    experts: SequentialMLP | TEGroupedMLP,
    first: list[Tensor],
    second: list[Tensor],
    hidden: Tensor,
    tokens_per_expert: Tensor,
    probs: Tensor,
) -> Computed:
    """Apply each expert to its tokens.

    Args:
        first, second: weights ``[F, H]`` and ``[H, F]`` of each expert's layers.
        hidden: ``[rows, H]``, in the order of these experts; with expert parallelism, rows after
            those of the last one mean nothing. They have zeros in the output and as their gradient,
            or any numbers with ``moe_permute_fusion``, whose kernels read the experts' rows alone.
        tokens_per_expert: ``[experts]``, integers.
        probs: ``[rows]``, weights of the experts' activations.
        experts: also have ``adapters``, by the names of their layers, or none.

    Returns:
        ``[rows, H]``, partial sums over the experts' tensor-parallel ranks; and no bias.
    """
    config, weights = experts.config, probs.unsqueeze(-1)
    ends = tokens_per_expert.to(hidden.device).cumsum(0, dtype=torch.int32)
    tail = None
    has_tail = experts.ep_group.size() > 1 and experts.counts_stay_on_device
    if has_tail and not config.moe_permute_fusion:
        tail = (torch.arange(len(hidden), device=hidden.device) >= ends[-1]).unsqueeze(-1)
    if config.moe_apply_probs_on_input:
        hidden = (weights * hidden).to(hidden.dtype)
        weights = torch.ones_like(weights)
    adapters, is_reversed = getattr(experts, "adapters", {}), experts.counts_stay_on_device

    def product(rows: Tensor, weights: list[Tensor], name: str) -> Tensor:
        adapter = adapters[name] if name in adapters else None
        return _product(rows, ends, tail, weights, adapter, is_reversed)

    inner = product(hidden, first, "linear_fc1")
    if config.activation_func is squared_relu and config.use_fused_weighted_squared_relu:
        inner = weighted_squared_relu_impl(inner, weights)
    else:
        inner = (config.activation_func(inner) * weights).to(inner.dtype)
    return product(inner, second, "linear_fc2"), None


def _product(
    rows: Tensor,
    ends: Tensor,
    tail: Tensor | None,
    weights: Sequence[Tensor],
    adapter: ExpertAdapter | None,
    is_reversed: bool,
) -> Tensor:
    """Multiply the rows of each expert with its weight, and add the update of its adapter.

    Args:
        is_reversed: the rows are of the last expert first.
    """
    output = _GroupedLinear.apply(rows, ends, tail, *weights)
    if adapter is None:
        return output
    first, second = (each.flip(0) if is_reversed else each for each in adapter.weights())
    hidden = _GroupedLinear.apply(adapter.dropped(rows), ends, tail, first)
    return output + _GroupedLinear.apply(hidden * adapter.settings.scale, ends, tail, second)


class _GroupedLinear(torch.autograd.Function):
    """Multiplies the rows of each group with the group's own weight. Weights are one tensor with an
    axis of groups, or a tensor each; there are no biases.

    Where weights must be copied together, the backward does it again, so that it keeps no copies.
    Frozen weights need no rows in the backward, which are not kept. The grouped GEMM leaves rows of
    the tail as they were in memory: given a tail, they become zeros, in both directions.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, ends: Tensor, tail: Tensor | None, *weights: Tensor) -> Tensor:
        kept = rows if any(ctx.needs_input_grad[3:]) else None
        ctx.save_for_backward(kept, ends, tail, *weights)
        product = F.grouped_mm(rows, _together(weights).transpose(1, 2), offs=ends)
        return product if tail is None else product.masked_fill_(tail, 0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, tail, *weights = ctx.saved_tensors
        grad, of_rows, of_weights = grad.contiguous(), None, [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(grad, _together(weights), offs=ends)
            of_rows = of_rows if tail is None else of_rows.masked_fill_(tail, 0)
        if any(ctx.needs_input_grad[3:]):
            of_weights = F.grouped_mm(grad.t(), rows, offs=ends)
            of_weights = [of_weights] if weights[0].ndim == 3 else of_weights.unbind()
        return of_rows, None, None, *of_weights


def _together(weights: Sequence[Tensor]) -> Tensor:
    """Return weights as one tensor ``[experts, …]``: a view, where they lie at equal distances in
    one buffer in this order; else a copy. A single tensor with this axis stays as it is."""
    if weights[0].ndim == 3:
        return weights[0]
    first, places = weights[0], [weight.data_ptr() for weight in weights]
    steps = {after - before for before, after in itertools.pairwise(places)} or {first.nbytes}
    step = steps.pop()
    is_even = not steps and all(places)  # quantized tensors have no place
    is_even = is_even and step >= first.nbytes and first.is_contiguous()
    is_even = is_even and len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if not is_even or step % 16 or places[0] % 16:  # grouped GEMMs want multiples of 16 bytes
        return torch.stack(tuple(weights))
    return first.as_strided(
        (len(weights), *first.shape), (step // first.element_size(), *first.stride())
    )


def with_own_parts(moe: partial) -> partial:
    """Return the MoE layer builder of upstream's specs, with router, experts and dispatchers of
    ours."""
    submodules = moe.keywords["submodules"]
    kind = {SequentialMLP: GroupedExperts, TEGroupedMLP: TEGroupedExperts}[submodules.experts.func]
    experts = partial(kind, **submodules.experts.keywords)
    submodules = replace(submodules, router=LayoutFreeRouter, experts=experts)
    return partial(DeviceCountMoELayer, submodules=submodules)
