# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Exact fp32 master weights in the 16 bits that bf16 weights lack.

Transformer Engine's FusedAdam keeps the lower 16 bits of a master weight as a signed integer, the
remainder. The bf16 weight is the upper 16 bits, plus one if the remainder is negative: the master
weight rounded to nearest, ties away from zero.
"""

from argparse import Namespace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron.core.optimizer.optimizer_config import OptimizerConfig

aten = torch.ops.aten
VIEWS = {aten.detach.default, aten.index.Tensor, aten.slice.Tensor, aten.view.default}
"""Operations that `Masters` applies to both halves."""


def keeps_halves(options: OptimizerConfig | Namespace) -> bool:
    """Return whether Adam keeps remainders in place of fp32 master weights."""
    by_engine = options.fp8_recipe in (None, "delayed") or options.optimizer_cpu_offload
    is_whole = not options.store_param_remainders or options.main_params_dtype != torch.float32
    return options.use_precision_aware_optimizer and options.bf16 and by_engine and not is_whole


def whole_masters(weights: Tensor, remainders: Tensor) -> Tensor:
    """Return master weights, fp32, of bf16 weights and int16 remainders of the same shape."""
    bits, lower = weights.view(torch.int16).int(), remainders.int()
    bits -= (remainders < 0).to(torch.int8)
    bits <<= 16
    lower &= 0xFFFF
    return bits.bitwise_or_(lower).view(torch.float32)


def split_masters(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 weights and the int16 remainders of master weights, fp32."""
    bits = masters.contiguous().view(torch.int32)
    remainders = bits.to(torch.int16)
    upper = (bits >> 16) + (remainders < 0).int()
    return upper.to(torch.int16).view(torch.bfloat16), remainders


class Masters(Tensor):
    """Master weights, fp32, that an operation other than a view makes, as does a copy to the host.

    A checkpoint's writer copies one tensor after the other, so the device never has all of them.

    Args:
        weights: bf16. remainders: int16, of the same shape; may be on the host.
    """

    @staticmethod
    def __new__(cls, weights: Tensor, remainders: Tensor):
        where = {"dtype": torch.float32, "device": remainders.device}
        return Tensor._make_wrapper_subclass(cls, weights.shape, **where)

    def __init__(self, weights: Tensor, remainders: Tensor) -> None:
        self._halves = weights, remainders

    def __reduce_ex__(self, protocol: int) -> tuple:
        return Masters, self._halves

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in VIEWS:
            return cls(*(func(half, *args[1:]) for half in args[0]._halves))
        args, kwargs = tree_map_only(cls, cls._whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _whole(self) -> Tensor:
        weights, remainders = self._halves
        return whole_masters(weights, remainders.to(weights.device)).to(remainders.device)
