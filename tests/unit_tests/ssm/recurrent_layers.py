# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Small recurrent layers, on one rank and spread over CP ranks in either way."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.silu_gated_delta_net import SiluGatedDeltaNet
from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from tests.unit_tests.ssm.mixers import HIDDEN, make_mixer
from tests.unit_tests.test_utilities import Utils

MAMBA, DELTA_NET = "mamba", "gated delta net"


def make_layer(
    name: str,
    groups: SimpleNamespace,
    mode: str = "chunkwise",
    layout: str = "zigzag",
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    **options,
) -> nn.Module:
    """A layer over ``groups``, alike on all ranks of one TP coordinate.

    Args:
        heads: a delta net's key heads; Mamba has eight heads, in two groups.
        options: more fields of TransformerConfig.
    """
    if name == MAMBA:
        sizes = dict(mamba_num_heads=8, mamba_head_dim=16, mamba_num_groups=2) | options
        layer = make_mixer(groups, dtype=dtype, linear_cp_mode=mode, **sizes)
        with torch.no_grad():
            layer.A_log.sub_(3)  # decays slow enough that a state outlives a shard
    else:
        layer = _make_delta_net(groups, mode, dtype, heads, **options)
    if layout == "contiguous":
        tokens_are_contiguous(layer)
    return layer


def _make_delta_net(
    groups: SimpleNamespace, mode: str, dtype: torch.dtype, heads: int, **options
) -> SiluGatedDeltaNet:
    model_parallel_cuda_manual_seed(
        7, tp_rank=groups.tp.rank(), ep_rank=0, etp_rank=groups.tp.rank()
    )
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads,
        use_cpu_initialization=True,
        params_dtype=dtype,
        linear_cp_mode=mode,
        **options,
    )
    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=SequenceParallelNorm, out_proj=RowParallelLinear
    )
    layer = SiluGatedDeltaNet(config, submodules, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        # Heads must differ in every parameter: those that start out as ones would hide a mix-up.
        generator = torch.Generator().manual_seed(groups.tp.rank())
        noise = torch.rand(2, *layer.dt_bias.shape, generator=generator).to(layer.dt_bias.device)
        layer.dt_bias.add_(noise[0])
        layer.A_log.copy_(noise[1] - 4)  # decays slow enough that a state outlives a shard
    return layer.to(Utils.device, dtype)


def call(layer: nn.Module, hidden: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
    """A layer's output."""
    more = {"attention_mask": None} if isinstance(layer, SiluGatedDeltaNet) else {}
    return layer(hidden, packed_seq_params=packed_seq_params, **more)[0]
