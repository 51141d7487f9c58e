# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""State of the distributed optimizer where Adam is PyTorch's own."""

from types import SimpleNamespace

import torch

from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def test_a_state_without_a_step_is_loaded():
    """The reshardable format keeps the step elsewhere."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(1)
    adam.step()
    optimizer = SimpleNamespace(
        model_param_group_index_map={parameter: (0, 0)},
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        optimizer=adam,
    )
    saved = {"param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}
    loaded = {name: torch.tensor([value]) for name, value in saved.items()}
    with torch.no_grad():
        DistributedOptimizer._set_main_param_and_optimizer_states(optimizer, parameter, loaded)
    assert {"param": parameter, "step": 1.0, **adam.state[parameter]} == {"step": 1.0, **saved}


def test_a_rank_without_parameters_has_a_state(monkeypatch):
    """Its group may have experts on other pipeline stages only."""
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    empty = SimpleNamespace(state_dict=lambda: {"state": {}, "param_groups": []})
    state = DistributedOptimizer.state_dict(SimpleNamespace(optimizer=empty, grad_scaler=None))
    assert state["optimizer"]["param_groups"] == []
