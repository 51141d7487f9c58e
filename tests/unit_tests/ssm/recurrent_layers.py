# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Small recurrent layers, on one rank and spread over CP ranks in either way."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.silu_gated_delta_net import SiluGatedDeltaNet
from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from tests.unit_tests.test_utilities import Utils

HIDDEN = 32
MAMBA, DELTA_NET = "mamba", "gated delta net"
PROJECTIONS = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
SIZES = dict(
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_num_groups=2,
    mamba_state_dim=8,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)
"""Sizes of both kinds of layers, without the delta net's heads."""


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
    tp_rank = groups.tp.rank()
    model_parallel_cuda_manual_seed(7, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank)
    torch.manual_seed(7)
    sizes = SIZES | dict(linear_num_key_heads=heads, linear_num_value_heads=2 * heads)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        params_dtype=dtype,
        linear_cp_mode=mode,
        **sizes | options,
    )
    if name == MAMBA:
        parts = MambaMixerSubmodules(**PROJECTIONS)
        layer = MambaMixer(config, parts, HIDDEN, chunk_size=16, pg_collection=groups)
        varied = (layer.D, layer.norm.weight, layer.conv1d_bias)
    else:
        parts = GatedDeltaNetSubmodules(**PROJECTIONS, out_norm=SequenceParallelNorm)
        layer = SiluGatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
        layer.A_log.data.fill_(-1)
        varied = (layer.dt_bias, layer.A_log)
    # Heads must differ in every parameter: those that start out as ones would hide a mix-up.
    generator = torch.Generator().manual_seed(tp_rank)
    with torch.no_grad():
        for parameter in varied:
            parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter.device))
        layer.A_log.sub_(3)  # decays slow enough that a state outlives a shard
    if layout == "contiguous":
        tokens_are_contiguous(layer)
    return layer.to(Utils.device, dtype)


def call(layer: nn.Module, hidden: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
    """A layer's output."""
    more = {"attention_mask": None} if isinstance(layer, SiluGatedDeltaNet) else {}
    return layer(hidden, packed_seq_params=packed_seq_params, **more)[0]
