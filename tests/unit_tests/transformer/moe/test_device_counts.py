# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""MoE layers that keep token counts on the device, against upstream's all-to-all dispatcher, and
the grouped GEMMs of their experts."""

import re
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import grouped_experts
from megatron.core.transformer.moe.device_counts import DeviceCountDispatcher
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.grouped_experts import with_own_parts
from megatron.core.transformer.moe.layout_free_router import LayoutFreeRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size
from tests.unit_tests.transformer.moe import test_layout_free_router

HIDDEN, INNER, EXPERTS, LENGTH, BATCH = test_layout_free_router.HIDDEN, 24, 4, 12, 2
TOLERANCE = dict(rtol=1e-5, atol=5e-6)
"""Gradients are sums of a hundred values of order 1 in another order, in fp32."""

MOE_AGAIN = dict(recompute_granularity="selective", recompute_modules=["moe"])
ON_DEVICE = dict(moe_token_dispatcher_type="allgather", moe_grouped_gemm=True)

config_of = partial(
    test_layout_free_router.config_of,
    num_moe_experts=EXPERTS,
    moe_ffn_hidden_size=INNER,
    moe_shared_expert_intermediate_size=INNER,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=1e-2,
    moe_token_dispatcher_type="alltoall",
    activation_func=squared_relu,
)


class StandIn(torch.nn.Module):
    """Has the parameters of Transformer Engine's grouped linear layer, and its result."""

    def __init__(self, count, inputs, outputs, *, pg_collection, is_column, **_) -> None:
        super().__init__()
        etp = pg_collection.expt_tp.size()
        shape = (outputs // etp, inputs) if is_column else (outputs, inputs // etp)
        for number in range(count):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(shape)))

    def forward(self, rows: torch.Tensor, counts: list[int]):
        groups = zip(rows.split(counts), self.parameters(), strict=True)
        return torch.cat([group @ weight.t() for group, weight in groups]), None


ENGINE = partial(
    TEGroupedMLP,
    submodules=GroupedMLPSubmodules(
        linear_fc1=partial(StandIn, is_column=True), linear_fc2=partial(StandIn, is_column=False)
    ),
)


def make(groups: ProcessGroupCollection, config: TransformerConfig, engine: bool, is_own: bool):
    """A MoE layer whose parameters depend on their names and global experts alone."""
    builder = get_moe_module_spec(use_te=False, num_experts=1)
    submodules = replace(builder.keywords["submodules"], router=LayoutFreeRouter)
    if engine:
        submodules = replace(submodules, experts=ENGINE)
    builder = partial(builder.func, submodules=submodules)
    layer = (with_own_parts(builder) if is_own else builder)(config=config, pg_collection=groups)
    layer.set_layer_number(1)
    first = groups.ep.rank() * EXPERTS // groups.ep.size()
    for name, parameter in layer.named_parameters():
        number, dim = 2 if "fc2" in name else 1, 1 if "fc2" in name else 0
        expert, shape = re.search(r"local_experts\.(\d+)|weight(\d+)$", name), parameter.shape
        if expert:
            number += 2 + 2 * (first + int(expert[1] or expert[2]))
            shape = (HIDDEN, INNER) if dim else (INNER, HIDDEN)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(number)) / 4
        if expert:
            whole = whole.chunk(groups.expt_tp.size(), dim)[groups.expt_tp.rank()]
        parameter.data.copy_(whole)
    return layer.to(Utils.device)


@pytest.fixture
def groups_of():
    """Makes the groups of a layout of this world's ranks; they end with the test."""
    grids = []

    def make_groups(ep: int, etp: int) -> ProcessGroupCollection:
        Utils.initialize_distributed()
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()
        grid = HyperCommGrid([1, 1, Utils.world_size, 1], ["tp", "cp", "dp", "pp"])
        sizes = [etp, ep, Utils.world_size // (ep * etp), 1]
        dims = ["expt_tp", "ep", "expt_dp", "pp"]
        grid.register_view("expert", sizes, dims, shared_dims=["pp"])
        grids.append(grid)
        model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
        return ProcessGroupCollection.from_hyper_comm_grid(grid)

    yield make_groups
    for grid in grids:
        grid.destroy()


def results(layer: torch.nn.Module, padding: torch.Tensor) -> dict[str, torch.Tensor]:
    """The layer's output, and gradients of its input and parameters, for this rank's tokens."""
    draw = torch.Generator().manual_seed(20 + Utils.rank)
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=draw).to(Utils.device).requires_grad_()
    output, bias = layer(hidden, padding_mask=padding)
    output.sin().sum().backward()
    assert bias is None
    found = {"output": output, "input": hidden.grad}
    found["tokens per expert"] = layer.router.local_tokens_per_expert
    for name, parameter in layer.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def layouts():
    for ranks, ep, etp in ((4, 2, 2), (4, 4, 1), (4, 2, 1), (2, 2, 1), (2, 1, 2), (1, 1, 1)):
        yield pytest.param(ep, etp, marks=requires_world_size(ranks), id=f"{ranks}-{ep}-{etp}")


@pytest.mark.parametrize("options", [{}, MOE_AGAIN], ids=["kept", "recomputed"])
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize(("ep", "etp"), [*layouts()])
def test_all_is_as_with_the_all_to_all_dispatcher(groups_of, ep, etp, engine, options):
    """Output, gradients, counts and names in checkpoints; the host waits for nothing."""
    parallel = dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    groups = groups_of(ep, etp)
    padding = torch.arange(LENGTH).expand(BATCH, -1) >= LENGTH - 3 * Utils.rank
    padding = padding.to(Utils.device)
    upstreams = make(groups, config_of(**parallel, **options), engine, is_own=False)
    own = make(groups, config_of(**parallel, **options, **ON_DEVICE), engine, is_own=True)
    assert type(own.token_dispatcher) is DeviceCountDispatcher
    expected = results(upstreams, padding)
    with nullcontext() if HAVE_CUDA else no_host_sync():  # on GPUs, fp32 products wait
        found = results(own, padding)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    if not engine:
        metadata = {"dp_cp_group": groups.dp_cp}
        names = [
            {tensor.key for tensor in layer.sharded_state_dict(metadata=metadata).values()}
            for layer in (own, upstreams)
        ]
        assert names[0] == names[1]


@requires_world_size(1)
@pytest.mark.parametrize("engine", [False, True])
def test_experts_weights_in_one_buffer_are_not_copied(groups_of, engine, monkeypatch):
    """DDP lays out trained experts."""
    groups, padding = groups_of(1, 1), torch.zeros(BATCH, LENGTH, dtype=torch.bool).to(Utils.device)
    layers = [make(groups, config_of(**ON_DEVICE), engine, is_own=True) for _ in range(2)]
    expected = results(layers[0], padding)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    DistributedDataParallel(layers[1].config, ddp_config, layers[1], pg_collection=groups)
    for weights in layers[1].experts.weights():
        together = grouped_experts._together(weights)
        assert [each.data_ptr() for each in weights] == [each.data_ptr() for each in together]
    monkeypatch.setattr(grouped_experts.torch, "stack", None)
    found = results(layers[1], padding)
    for name in ("output", "input"):
        torch.testing.assert_close(found[name], expected[name])


@requires_world_size(1)
def test_parameter_gathers_are_awaited_in_the_order_of_the_experts(groups_of):
    """DDP gathers beside the forward, waits before it calls a layer, and starts the next then."""
    layer = make(groups_of(1, 1), config_of(**ON_DEVICE), False, is_own=True)
    seen = []
    for number, expert in enumerate(layer.experts.local_experts):
        for linear in (expert.linear_fc1, expert.linear_fc2):
            linear.register_forward_pre_hook(lambda *_, number=number: seen.append(number))
    results(layer, torch.zeros(BATCH, LENGTH, dtype=torch.bool).to(Utils.device))
    assert seen == [0, 1, 2, 3] * 2


@requires_world_size(2)
def test_fused_permutations_leave_anything_in_the_rows_after_the_experts(groups_of):
    """Transformer Engine's kernels neither write these rows nor read them."""
    groups, padding = groups_of(2, 1), torch.zeros(BATCH, LENGTH, dtype=torch.bool).to(Utils.device)
    own = make(groups, config_of(expert_model_parallel_size=2, **ON_DEVICE), False, is_own=True)
    expected = results(own, padding)
    own.zero_grad()
    own.experts.config = copy(own.config)
    own.experts.config.moe_permute_fusion = True
    dispatcher = own.token_dispatcher
    dispatch, combine = dispatcher.dispatch_postprocess, dispatcher.combine_preprocess

    def tail_of(rows):
        return torch.arange(len(rows), device=rows.device) >= dispatcher.local_map.sum()

    def dispatched(*tokens):
        rows, counts, weights = dispatch(*tokens)
        tail = tail_of(rows)
        rows = rows.masked_fill(tail[:, None], torch.nan)
        return rows, counts, weights.masked_fill(tail, torch.nan)

    def combined(rows):
        tail = tail_of(rows)[:, None]
        rows.register_hook(lambda grad: grad.masked_fill(tail, torch.nan))
        return combine(rows.masked_fill(tail, 0.0))

    dispatcher.dispatch_postprocess, dispatcher.combine_preprocess = dispatched, combined
    torch.testing.assert_close(results(own, padding), expected, **TOLERANCE)


@requires_world_size(1)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_only_hoppers_grouped_gemm_is_used(groups_of, capability, monkeypatch):
    """Elsewhere it is wrong for experts without tokens."""
    groups, used = groups_of(1, 1), pytest.raises(RuntimeError, match="used")
    config = config_of()
    config.moe_grouped_gemm = True
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(grouped_experts.F, "grouped_mm", Mock(side_effect=RuntimeError("used")))
        layer = make(groups, config, engine=False, is_own=True)
        with used if capability == (9, 0) else nullcontext():
            layer(torch.randn(LENGTH, BATCH, HIDDEN, device=Utils.device))
