# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of expert parameters, which expert-DP has reduced, are not summed over dense TP."""

import sys
from types import SimpleNamespace

import pytest
import torch

import megatron.core.distributed.finalize_model_grads  # noqa: F401
from megatron.core import parallel_state

# The package has a function of the module's name.
finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]


@pytest.mark.parametrize(("has_global_groups", "of_expert"), [(False, 1), (True, 2)])
def test_only_dense_parameters_are_summed(has_global_groups, of_expert, monkeypatch):
    """`allreduce=False` marks a parameter of experts. Runs with global groups stay as they are."""
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: has_global_groups)
    own_group = "get_tensor_model_parallel_group_if_none"
    monkeypatch.setattr(finalizing, own_group, lambda group: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: tensor.mul_(2))
    model = torch.nn.Linear(1, 1)
    model.bias.allreduce = False
    for parameter in model.parameters():
        parameter.sequence_parallel, parameter.main_grad = True, torch.ones(1)
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    config = SimpleNamespace(sequence_parallel=True, qk_layernorm=False)
    two_ranks = SimpleNamespace(size=lambda: 2)
    finalizing._allreduce_non_tensor_model_parallel_grads([model], config, two_ranks)
    assert (model.weight.main_grad.item(), model.bias.main_grad.item()) == (2, of_expert)
