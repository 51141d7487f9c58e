# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Small Mamba mixers, on one rank and spread over CP ranks in either way."""

from types import SimpleNamespace

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils

HIDDEN = 32


def make_mixer(
    groups: SimpleNamespace, *, dtype: torch.dtype = torch.float32, **options
) -> MambaMixer:
    """A mixer over ``groups``, alike on all ranks of one TP coordinate.

    Args:
        options: fields of TransformerConfig, ``mamba_num_heads`` among them.
    """
    tp_rank = groups.tp.rank()
    model_parallel_cuda_manual_seed(7, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank)
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        mamba_state_dim=8,
        use_cpu_initialization=True,
        params_dtype=dtype,
        **options,
    )
    submodules = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = MambaMixer(config, submodules, HIDDEN, chunk_size=16, pg_collection=groups)
    with torch.no_grad():
        # Heads must differ in every parameter: those that start out as ones would hide a mix-up.
        generator = torch.Generator().manual_seed(tp_rank)
        for parameter in (mixer.D, mixer.norm.weight, mixer.conv1d_bias):
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device))
    return mixer.to(Utils.device, dtype)


def call(mixer: MambaMixer, hidden: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
    """The mixer's output."""
    return mixer(hidden, packed_seq_params=packed_seq_params)[0]
