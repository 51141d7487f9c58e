# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The hybrid stack and the ViT layer without Transformer Engine, against a run on one rank."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
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
VOCABULARY, LENGTH, BATCH = 32, 24, 2
EXPERTS = 4
# fp32, sums in another order: a few hundred roundings of values of order 1.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}
GRADIENT_ERROR = 1e-4


@pytest.fixture(autouse=True)
def _memory_buffer() -> None:
    """The buffer that sequence-parallel gathers write to; it belongs to no group."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


@pytest.fixture
def make_groups() -> Iterator:
    """Makes the process groups of one layout over all ranks: `make_groups(tp=, etp=, ep=)`."""
    Utils.initialize_distributed()
    grids = []

    def make(tp: int = 1, etp: int = 1, ep: int = 1) -> ProcessGroupCollection:
        world = Utils.world_size
        grid = HyperCommGrid([tp, 1, world // tp, 1], ["tp", "cp", "dp", "pp"])
        grid.register_view(
            "expert",
            [etp, ep, world // (etp * ep), 1],
            ["expt_tp", "ep", "expt_dp", "pp"],
            shared_dims=["pp"],
        )
        grids.append(grid)
        return ProcessGroupCollection.from_hyper_comm_grid(grid)

    yield make
    for grid in grids:
        grid.destroy()


def language_config(groups: ProcessGroupCollection, **options) -> TransformerConfig:
    """A small model with all that Nemotron's layers have: its experts, router, bias and norms."""
    sizes = {
        "tensor_model_parallel_size": groups.tp.size(),
        "sequence_parallel": groups.tp.size() > 1,
        "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": groups.expt_tp.size(),
    }
    return TransformerConfig(
        num_layers=len(PATTERN),
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=96,
        mamba_num_heads=8,
        mamba_head_dim=8,
        mamba_num_groups=2,
        mamba_state_dim=8,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=64,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        normalization="RMSNorm",
        activation_func=squared_relu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="native",
        is_hybrid_model=True,
        **sizes,
        **options,
    )


def make_language_model(groups: ProcessGroupCollection, pattern: str = PATTERN) -> HybridModel:
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
    torch.manual_seed(7)
    model = HybridModel(
        config=language_config(groups),
        hybrid_stack_spec=get_hybrid_local_stack_spec(ContextParallelAttention),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        hybrid_layer_pattern=pattern,
        pg_collection=groups,
    )
    return model.to(Utils.device)


def tokens(rows: int, length: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator).to(Utils.device)


def loss_of(model: HybridModel) -> torch.Tensor:
    """Loss of every token, `[BATCH, LENGTH]`."""
    return model(tokens(BATCH, LENGTH), None, None, labels=tokens(BATCH, LENGTH, seed=4))


def shard(whole: torch.Tensor, like: torch.nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    """The part of a whole parameter (or its gradient) that this rank of `group` holds."""
    if not getattr(like, "tensor_model_parallel", False):
        return whole
    dim = like.partition_dim
    sizes = getattr(like, "partition_sizes", None) or [like.shape[dim]]
    parts = whole.split([size * group.size() for size in sizes], dim)
    return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in parts], dim)


def whole_counterparts(
    model: torch.nn.Module, whole: torch.nn.Module, groups: ProcessGroupCollection
) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Parameter, dist.ProcessGroup]]:
    """Each parameter of a sharded model, with that of the whole model it is a part of."""
    parameters = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        group, whole_name = groups.tp, name
        if ".local_experts." in name:
            group = groups.expt_tp
            before, after = name.split(".local_experts.")
            index, _, rest = after.partition(".")
            index = int(index) + groups.ep.rank() * EXPERTS // groups.ep.size()
            whole_name = f"{before}.local_experts.{index}.{rest}"
        yield name, parameter, parameters[whole_name], group


def copy_shards(
    model: torch.nn.Module, whole: torch.nn.Module, groups: ProcessGroupCollection
) -> None:
    with torch.no_grad():
        for _, parameter, source, group in whole_counterparts(model, whole, groups):
            parameter.copy_(shard(source, parameter, group))


def assert_gradients_are_shards(
    model: torch.nn.Module, whole: torch.nn.Module, groups: ProcessGroupCollection
) -> None:
    """Compare gradients after Megatron's sum over tp for parameters marked `sequence_parallel`."""
    for name, parameter, source, group in whole_counterparts(model, whole, groups):
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=groups.tp)
        expected = shard(source.grad, parameter, group)
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error <= GRADIENT_ERROR, f"gradient of {name} is off by {error:.1e} of its norm"


@requires_world_size(1)
class TestOneRank:
    def test_every_parameter_gets_a_gradient(self, make_groups):
        model = make_language_model(make_groups())
        loss_of(model).mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name

    @pytest.mark.parametrize("pattern", ["M", "*", PATTERN])
    def test_packed_row_equals_separate_sequences(self, make_groups, pattern):
        model = make_language_model(make_groups(), pattern)
        lengths = [3, 1, 12, 8]
        row = tokens(1, sum(lengths))
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(Utils.device)
        packed = model(
            row,
            None,
            None,
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=boundaries,
                cu_seqlens_kv=boundaries,
                max_seqlen_q=max(lengths),
                max_seqlen_kv=max(lengths),
                total_tokens=row.shape[1],
            ),
        )
        separate = [model(part, None, None) for part in row.split(lengths, dim=1)]
        torch.testing.assert_close(packed, torch.cat(separate, dim=1), **TOLERANCE)

    def test_tokens_see_the_past_only(self, make_groups):
        model = make_language_model(make_groups())
        row = tokens(1, LENGTH)
        changed = row.clone()
        changed[0, 10] = (changed[0, 10] + 1) % VOCABULARY
        before, after = model(row, None, None), model(changed, None, None)
        torch.testing.assert_close(after[:, :10], before[:, :10], **TOLERANCE)
        assert (after[:, 10:] - before[:, 10:]).abs().amax(dim=(0, 2)).gt(1e-4).all()


@requires_world_size(2)
class TestTwoRanks:
    @pytest.mark.parametrize("experts", [{"ep": 2}, {"etp": 2}], ids=str)
    def test_sequence_parallel_equals_one_rank(self, make_groups, experts):
        whole = make_language_model(make_groups())
        groups = make_groups(tp=2, **experts)
        model = make_language_model(groups)
        copy_shards(model, whole, groups)
        expected, got = loss_of(whole), loss_of(model)
        torch.testing.assert_close(got, expected, **TOLERANCE)
        expected.mean().backward()
        got.mean().backward()
        assert_gradients_are_shards(model, whole, groups)

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_vit_layer_equals_one_rank(self, make_groups, sequence_parallel):
        whole = make_vit_layer(make_groups(), sequence_parallel=False)
        groups = make_groups(tp=2)
        layer = make_vit_layer(groups, sequence_parallel)
        copy_shards(layer, whole, groups)
        torch.manual_seed(3)
        patches, weight = torch.randn(2, LENGTH, BATCH, 64, device=Utils.device)
        part = slice(None)
        if sequence_parallel:
            part = slice(groups.tp.rank() * LENGTH // 2, (groups.tp.rank() + 1) * LENGTH // 2)
        expected, _ = whole(patches, None)
        got, _ = layer(patches[part], None)
        torch.testing.assert_close(got, expected[part], **TOLERANCE)
        (expected * weight).mean().backward()
        (got * weight[part]).sum().div(weight.numel()).backward()
        assert_gradients_are_shards(layer, whole, groups)


def vit_config(groups: ProcessGroupCollection, sequence_parallel: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=96,
        normalization="LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=sequence_parallel,
    )


def make_vit_layer(groups: ProcessGroupCollection, sequence_parallel: bool) -> torch.nn.Module:
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
    torch.manual_seed(7)
    layer = build_module(
        vit_local_layer_spec(ContextParallelAttention),
        config=vit_config(groups, sequence_parallel),
        layer_number=1,
        pg_collection=groups,
    )
    return layer.to(Utils.device)


@requires_world_size(1)
class TestVitLayer:
    def test_every_token_sees_every_other(self, make_groups):
        layer = make_vit_layer(make_groups(), sequence_parallel=False)
        torch.manual_seed(3)
        patches = torch.randn(LENGTH, 1, 64, device=Utils.device)
        changed = patches.clone()
        changed[10] *= -1
        before, after = layer(patches, None)[0], layer(changed, None)[0]
        assert (after - before).abs().amax(dim=(1, 2)).gt(1e-5).all()
