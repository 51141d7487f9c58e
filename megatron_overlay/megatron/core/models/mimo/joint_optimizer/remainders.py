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

from megatron.core.optimizer.optimizer_config import OptimizerConfig


def keeps_halves(options: OptimizerConfig | Namespace) -> bool:
    """Return whether Adam keeps remainders in place of fp32 master weights."""
    by_engine = options.fp8_recipe in (None, "delayed") or options.optimizer_cpu_offload
    is_whole = not options.store_param_remainders or options.main_params_dtype != torch.float32
    return options.use_precision_aware_optimizer and options.bf16 and by_engine and not is_whole


def whole_masters(weights: Tensor, remainders: Tensor) -> Tensor:
    """Return master weights, fp32, of bf16 weights and int16 remainders of the same shape."""
    upper = weights.view(torch.int16).int() - (remainders < 0).int()
    return ((upper << 16) | (remainders.int() & 0xFFFF)).view(torch.float32)


def split_masters(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 weights and the int16 remainders of master weights, fp32."""
    bits = masters.contiguous().view(torch.int32)
    remainders = bits.to(torch.int16)
    upper = (bits >> 16) + (remainders < 0).int()
    return upper.to(torch.int16).view(torch.bfloat16), remainders
