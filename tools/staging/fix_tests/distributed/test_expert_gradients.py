# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The sum over dense TP ranks leaves expert parameters out, where groups are explicit."""

import sys
from types import SimpleNamespace

import torch

import megatron.core.distributed.finalize_model_grads  # noqa: F401

finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]
"""The package has a function of the module's name."""


def test_gradients_of_expert_parameters_are_not_summed_over_tp(monkeypatch):
    """`allreduce=False` marks them; expert-DP has reduced them already."""
    own_group = "get_tensor_model_parallel_group_if_none"
    monkeypatch.setattr(finalizing, own_group, lambda group: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: tensor.mul_(2))
    model = torch.nn.Module()
    model.dense, model.expert = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    model.expert.allreduce = False
    for parameter in model.parameters():
        parameter.sequence_parallel = True
        parameter.main_grad = torch.ones(2)
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    config = SimpleNamespace(sequence_parallel=True, qk_layernorm=False)
    two_ranks = SimpleNamespace(size=lambda: 2)
    finalizing._allreduce_non_tensor_model_parallel_grads([model], config, two_ranks)
    assert model.dense.main_grad.tolist() == [2, 2]
    assert model.expert.main_grad.tolist() == [1, 1]
