# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of expert parameters, which expert-DP has reduced, are not summed over dense TP."""

import sys
from types import SimpleNamespace

import torch

import megatron.core.distributed.finalize_model_grads  # noqa: F401

# The package has a function of the module's name.
finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]


def test_only_dense_parameters_are_summed(monkeypatch):
    """`allreduce=False` marks a parameter of experts."""
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
    assert (model.weight.main_grad.item(), model.bias.main_grad.item()) == (2, 1)
