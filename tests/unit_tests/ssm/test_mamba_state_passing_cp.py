# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Mamba mixer that passes states between CP ranks, against the same mixer on whole samples."""

import pytest
import torch

from megatron.core.context_parallel_layout import PaddedLengths, pad_lengths
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.ssm.whole_and_sharded import Pair, Ranks, random_rows
from tests.unit_tests.test_utilities import Utils, requires_world_size

HIDDEN, HEADS, GROUPS, SEQUENCE, BATCH = 32, 6, 2, 48, 2
# Odd, empty, below 2·cp, and longer than a chunk of the scan and than a shard.
PACKED = (5, 0, 1, 39, 9)
LAYOUTS = ("zigzag", "contiguous")


def rows(worlds):
    """(pair's arguments, dtype) by world size."""
    return [
        pytest.param((ranks, layout, dtype), marks=requires_world_size(world),
                     id=f"{ranks},{layout},{str(dtype)[6:]}")
        for world, ranks, layout, dtype in worlds
    ]  # fmt: skip


# No number of ranks but 2 divides the heads and groups: the head-parallel path takes none of them.
CASES = rows(
    [
        (2, Ranks(cp=2), "zigzag", torch.float32),
        (2, Ranks(cp=2), "contiguous", torch.float64),
        (4, Ranks(cp=3), "zigzag", torch.float32),
        (4, Ranks(cp=4), "contiguous", torch.float32),
        (4, Ranks(cp=4), "zigzag", torch.float64),
        (4, Ranks(cp=2, tp=2), "zigzag", torch.float32),
        (4, Ranks(cp=2, tp=2), "contiguous", torch.float32),
        (8, Ranks(cp=5), "zigzag", torch.float32),
        (8, Ranks(cp=8), "contiguous", torch.float64),
    ]
)


def make_mixer(groups, passes_states: bool, layout: str, dtype: torch.dtype) -> MambaMixer:
    model_parallel_cuda_manual_seed(
        7, tp_rank=groups.tp.rank(), ep_rank=0, etp_rank=groups.tp.rank()
    )
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        mamba_num_heads=HEADS,
        mamba_head_dim=8,
        mamba_num_groups=GROUPS,
        mamba_state_dim=8,
        use_cpu_initialization=True,
        params_dtype=dtype,
        linear_context_parallel="state-passing" if passes_states else "head-parallel",
        hybrid_token_layout=layout if passes_states else "zigzag",
    )
    submodules = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = MambaMixer(config, submodules, HIDDEN, chunk_size=16, pg_collection=groups)
    with torch.no_grad():
        # Heads that differ in every parameter: those that start out as ones would hide a mix-up.
        generator = torch.Generator().manual_seed(groups.tp.rank())
        for parameter in (mixer.D, mixer.norm.weight, mixer.conv1d.bias):
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device))
        # Decays slow enough that a state outlives a shard.
        mixer.A_log.sub_(3)
    return mixer.to(Utils.device, dtype)


@pytest.fixture
def pair(request):
    """The mixers and the dtype; None on an idle rank, which has only helped to make groups."""
    ranks, layout, dtype = request.param
    pair = Pair(ranks, lambda groups, shards: make_mixer(groups, shards, layout, dtype), layout)
    pair.dtype = dtype
    yield pair if pair.is_member else None
    pair.destroy()


def call(mixer, hidden, packed_seq_params):
    return mixer(hidden, packed_seq_params=packed_seq_params)[0]


@pytest.mark.parametrize("pair", CASES, indirect=True)
class TestMixerThatPassesStates:
    def test_a_plain_batch_equals_one_rank(self, pair):
        if pair:
            length = SEQUENCE if SEQUENCE % (2 * pair.size) == 0 else 10 * pair.size
            hidden = random_rows(length, BATCH, HIDDEN, seed=1).to(pair.dtype)
            pair.assert_equal(call, hidden, PaddedLengths((length,), (length,)), packed=False)

    def test_packed_samples_equal_each_sample_alone(self, pair):
        if pair:
            hidden = random_rows(sum(PACKED), 1, HIDDEN, seed=1).to(pair.dtype)
            pair.assert_equal(call, hidden, pad_lengths(PACKED, pair.size), packed=True)
