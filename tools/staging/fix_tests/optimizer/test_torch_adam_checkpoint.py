# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""State of the distributed optimizer where Adam is PyTorch's own."""

from types import SimpleNamespace

import torch

from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@torch.no_grad()
def test_a_state_without_a_step_is_loaded():
    """The step is kept elsewhere in the reshardable format."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    adam = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    adam.step()
    optimizer = SimpleNamespace(
        model_param_group_index_map={"the model's parameter": (0, 0)},
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        optimizer=adam,
    )
    loaded = {"param": torch.ones(3), "exp_avg": torch.ones(3) * 2, "exp_avg_sq": torch.ones(3) * 3}
    DistributedOptimizer._set_main_param_and_optimizer_states(
        optimizer, "the model's parameter", loaded
    )
    assert parameter.tolist() == [1, 1, 1]
    assert adam.state[parameter]["exp_avg"].tolist() == [2, 2, 2]
    assert adam.state[parameter]["exp_avg_sq"].tolist() == [3, 3, 3]
    assert adam.state[parameter]["step"] == 1


def test_a_rank_without_parameters_has_a_state(monkeypatch):
    """Experts on other pipeline stages only, say."""
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    empty = SimpleNamespace(state_dict=lambda: {"state": {}, "param_groups": []})
    optimizer = SimpleNamespace(optimizer=empty, grad_scaler=None)
    state = DistributedOptimizer.state_dict(optimizer)
    assert state["optimizer"]["param_groups"] == []
