# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens see each other as they should in the hybrid stack and the ViT without Transformer Engine.

rows.py of the training program compares both with one rank, on TP, expert and CP ranks.
"""

from collections.abc import Iterator

import pytest
import torch

from megatron.core.activations import squared_relu
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.hybrid.hybrid_local_specs import (
    get_hybrid_local_stack_spec,
    vit_local_layer_spec,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.test_utilities import Utils, requires_world_size

PATTERN = "MEM*-ME"
VOCABULARY, LENGTH, HIDDEN = 32, 24, 64
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}
"""A few hundred roundings of values of order 1, in fp32."""


@pytest.fixture
def groups() -> Iterator[ProcessGroupCollection]:
    """The groups of one rank."""
    Utils.initialize_distributed()
    grid = HyperCommGrid([1, 1, 1, 1], ["tp", "cp", "dp", "pp"])
    dims = ["expt_tp", "ep", "expt_dp", "pp"]
    grid.register_view("expert", [1, 1, 1, 1], dims, shared_dims=["pp"])
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
    torch.manual_seed(7)
    yield ProcessGroupCollection.from_hyper_comm_grid(grid)
    grid.destroy()


def config_of(**options) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=96,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **options,
    )


def make_language_model(groups: ProcessGroupCollection, pattern: str = PATTERN) -> HybridModel:
    config = config_of(
        num_layers=len(pattern),
        num_query_groups=2,
        mamba_num_heads=8,
        mamba_head_dim=8,
        mamba_num_groups=2,
        mamba_state_dim=8,
        num_moe_experts=4,
        moe_ffn_hidden_size=48,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        normalization="RMSNorm",
        activation_func=squared_relu,
        add_bias_linear=False,
        is_hybrid_model=True,
    )
    model = HybridModel(
        config=config,
        hybrid_stack_spec=get_hybrid_local_stack_spec(ContextParallelAttention),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        hybrid_layer_pattern=pattern,
        pg_collection=groups,
    )
    return model.to(Utils.device)


def row_of_tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator).to(Utils.device)


@requires_world_size(1)
@pytest.mark.parametrize("pattern", ["M", "*", PATTERN])
def test_packed_samples_see_themselves_alone(groups, pattern):
    model, row, lengths = make_language_model(groups, pattern), row_of_tokens(), [3, 1, 12, 8]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(Utils.device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        total_tokens=LENGTH,
    )
    packed = model(row, None, None, packed_seq_params=params)
    separate = [model(part, None, None) for part in row.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), **TOLERANCE)


@requires_world_size(1)
def test_tokens_see_the_past_only(groups):
    model, row = make_language_model(groups), row_of_tokens()
    changed = row.clone()
    changed[0, 10] = (changed[0, 10] + 1) % VOCABULARY
    before, after = model(row, None, None), model(changed, None, None)
    torch.testing.assert_close(after[:, :10], before[:, :10], **TOLERANCE)
    assert (after[:, 10:] - before[:, 10:]).abs().amax(dim=(0, 2)).gt(1e-4).all()


@requires_world_size(1)
def test_every_patch_sees_every_other(groups):
    layer = build_module(
        vit_local_layer_spec(ContextParallelAttention),
        config=config_of(num_layers=1, normalization="LayerNorm"),
        layer_number=1,
        pg_collection=groups,
    ).to(Utils.device)
    patches = torch.randn(LENGTH, 1, HIDDEN, device=Utils.device)
    changed = patches.clone()
    changed[10] *= -1
    before, after = layer(patches, None)[0], layer(changed, None)[0]
    assert (after - before).abs().amax(dim=(1, 2)).gt(1e-5).all()
