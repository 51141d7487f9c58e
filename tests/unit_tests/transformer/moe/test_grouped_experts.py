# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs against upstream's loop over the experts."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.core.activations import squared_relu
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.grouped_experts import GroupedExperts
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils, requires_world_size

HIDDEN, INNER, EXPERTS = 32, 48, 4
SUBMODULES = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

config_of = partial(
    TransformerConfig,
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    num_moe_experts=EXPERTS,
    moe_ffn_hidden_size=INNER,
    activation_func=squared_relu,
    add_bias_linear=False,
    moe_grouped_gemm=True,
    params_dtype=torch.float32,
    perform_initialization=False,
)


@pytest.fixture
def groups():
    Utils.initialize_distributed()
    grid = HyperCommGrid([1, 1], ["tp", "dp"])
    group = grid.create_pg("tp")
    yield ProcessGroupCollection(tp=group, ep=group, expt_tp=group, expt_dp=group)
    grid.destroy()


def filled(kind: type, groups: ProcessGroupCollection, config) -> torch.nn.Module:
    experts = kind(EXPERTS, config, SUBMODULES, pg_collection=groups)
    draw = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) / 6)
    return experts.to(Utils.device)


@requires_world_size(1)
@pytest.mark.parametrize("counts", [(5, 0, 9, 2), (0, 0, 0, 3), (0, 0, 0, 0)])
def test_outputs_and_gradients_are_those_of_the_loop(groups, counts):
    total, draw = sum(counts), torch.Generator().manual_seed(2)
    hidden = torch.randn(total, HIDDEN, generator=draw).to(Utils.device)
    probs = torch.rand(total, generator=draw).to(Utils.device)
    found = []
    for kind in (SequentialMLP, GroupedExperts):
        experts = filled(kind, groups, config_of())
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, probs)]
        output, bias = experts(inputs[0], torch.tensor(counts), inputs[1])
        output.sin().sum().backward()
        grads = [
            p.grad if p.grad is not None else torch.zeros_like(p) for p in experts.parameters()
        ]
        assert bias is None
        found.append([output, *(tensor.grad for tensor in inputs), *grads])
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@requires_world_size(1)
def test_rows_after_those_of_the_last_expert_mean_nothing(groups):
    """With expert parallelism; the grouped GEMM leaves whatever was in memory there."""
    counts, total = torch.tensor([3, 0, 4, 1]).to(Utils.device), 8
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(total + 6, HIDDEN, generator=draw)
    probs = torch.rand(total + 6, generator=draw)
    hidden[total:] = probs[total:] = torch.nan
    found = []
    for rows, ep in ((total, 1), (total + 6, 2)):
        experts = filled(GroupedExperts, groups, config_of(moe_token_dispatcher_type="allgather"))
        experts.ep_group = SimpleNamespace(size=lambda ep=ep: ep)
        inputs = [t[:rows].to(Utils.device).requires_grad_() for t in (hidden, probs)]
        output, _ = experts(inputs[0], counts, inputs[1])
        output.sin().sum().backward()
        for tensor in (output, inputs[0].grad):
            assert not tensor[total:].any()
        parts = [tensor[:total] for tensor in (output, inputs[0].grad, inputs[1].grad)]
        found.append([*parts, *(parameter.grad for parameter in experts.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@requires_world_size(1)
@pytest.mark.parametrize("option", ["add_bias_linear", "gated_linear_unit"])
def test_what_it_does_not_compute_is_refused(groups, option):
    with pytest.raises(ValueError, match="takes no biases and no gated units"):
        GroupedExperts(EXPERTS, config_of(**{option: True}), SUBMODULES, pg_collection=groups)


@requires_world_size(1)
def test_weights_are_waited_for_as_before_a_call(groups):
    """DDP gathers parameters beside the forward, and waits for them before a layer is called."""
    experts = filled(GroupedExperts, groups, config_of())
    layers = [
        getattr(e, name) for e in experts.local_experts for name in ("linear_fc1", "linear_fc2")
    ]
    waited = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: waited.append(module))
    hidden = torch.ones(4, HIDDEN, device=Utils.device)
    experts(hidden, torch.tensor([1, 1, 1, 1]), torch.ones(4, device=Utils.device))
    assert set(waited) == set(layers)
