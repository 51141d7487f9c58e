# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Verdict and norm of the gradients of all modules, and clipping, for their optimizer.

Results stay on the device, so that a step waits for them once.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from megatron.core.models.mimo.joint_optimizer.state import leaves
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.utils import local_multi_tensor_l2_norm


def gradient_name(leaf: MegatronOptimizer) -> str:
    """Return the attribute of a parameter in which an optimizer reads the gradient."""
    is_aware = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return "decoupled_grad" if is_aware else "grad"


def gradients_of(leaf: MegatronOptimizer) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return the parameters that an optimizer steps, with the gradients that it reads."""
    name = gradient_name(leaf)
    found = ((parameter, getattr(parameter, name, None)) for parameter in leaf.get_parameters())
    return [(parameter, gradient) for parameter, gradient in found if gradient is not None]


def unscale(leaf: MegatronOptimizer) -> torch.Tensor | bool:
    """Run ``prepare_grads`` of one optimizer without updating its loss scale, and return whether it
    found an inf or NaN.

    Without a loss scaler, an inf or NaN shows in the gradient norm, except in parameters that TP
    ranks repeat: the norm reads those on the first TP rank only, so they are checked here.
    """
    if getattr(leaf, "grad_scaler", None) is None:
        found_inf = leaf.prepare_grads()
        groups = leaf.tp_group, getattr(leaf, "expert_tp_group", None)
        repeated = [
            gradient
            for parameter, gradient in gradients_of(leaf)
            if not param_is_not_tensor_parallel_duplicate(parameter, *groups)
        ]
        if found_inf or not repeated:
            return found_inf
        return ~get_total_norm(repeated, norm_type=math.inf).isfinite()
    leaf._copy_model_grads_to_main_grads()
    return leaf._unscale_main_grads_and_check_for_nan()


def square(optimizer: ChainedOptimizer) -> torch.Tensor:
    """Return the square of the norm of a module's gradients, fp64 on the device. Collective in the
    module.

    Each sum is rounded to fp32, as upstream's. With deterministic algorithms it is summed in fp64,
    and `total_norm` rounds it once: its bits, by which gradients are clipped, then do not tell how
    the gradients are split over ranks.
    """
    is_exact = torch.are_deterministic_algorithms_enabled()
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    of_groups: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for leaf in leaves(optimizer):
        gradients = of_groups.setdefault(leaf.get_grad_stats_parallel_group(), [])
        gradients += leaf.get_grads_for_grad_norm()
    for group, gradients in of_groups.items():
        own = torch.zeros_like(total, dtype=total.dtype if is_exact else torch.float32)
        if is_exact:
            for gradient in gradients:
                own += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        else:
            own += sum(_norm(each) ** 2 for each in of_one_type(gradients))
        dist.all_reduce(own, group=group)
        total += own
    return total


def of_one_type(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide gradients into lists of one type each.

    Fused kernels read all tensors of a list in the type of the first. Mamba-2's rates are fp32 in a
    model in bfloat16, so gradients of both types come where bfloat16 gradients are not cast to
    fp32.
    """
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        found.setdefault(gradient.dtype, []).append(gradient)
    return list(found.values())


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients of one type, fp32, by a fused kernel where there is one."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # would wait for each gradient
        return get_total_norm(gradients)
    overflow = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
    lists = [gradients]
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, lists, False)
    return norm.squeeze()


def total_norm(squares: list[float]) -> float:
    """Return the norm of all gradients from the squares of the modules' norms."""
    kept = torch.float64 if torch.are_deterministic_algorithms_enabled() else torch.float32
    return float(torch.tensor(squares, dtype=kept).sum().sqrt().float())


def clip(gradients: list[torch.Tensor], most: float, norm: float) -> None:
    """Scale gradients of one type down to a norm of ``most``, if the norm of all is larger; by
    upstream's formula."""
    factor = most / (norm + 1e-6)
    if 0 < factor < 1:
        overflow = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
        lists = [gradients, gradients]
        clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, overflow, lists, factor)


def max_over_ranks(values: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """Return elementwise maxima over all ranks, fp64 on the device. NaN counts as inf, as a maximum
    may drop it."""
    own = torch.zeros(len(values), dtype=torch.float64, device=torch.cuda.current_device())
    for value, place in zip(values, own, strict=True):
        place += value  # numbers of the device stay there
    own.nan_to_num_(nan=math.inf, posinf=math.inf)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own
