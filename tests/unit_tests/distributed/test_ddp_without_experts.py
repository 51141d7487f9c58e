# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""DDP of a collection without a group for expert data parallelism."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

SIZES = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")


def groups_for_ddp(experts, monkeypatch):
    def collective(ranks):
        raise AssertionError("new_group waits for ranks that have no part in this module")

    monkeypatch.setattr(torch.distributed, "new_group", collective)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    fields = {name: f"the {name} group" for name in ("tp", "pp", "ep", "dp", "dp_cp")}
    return ProcessGroupCollection.setup_process_groups_for_ddp(
        ProcessGroupCollection(**fields, expt_dp=None),
        SimpleNamespace(num_moe_experts=experts, **dict.fromkeys(SIZES, 2)),
        DistributedDataParallelConfig(),
    )


def test_a_dense_module_needs_no_other_group(monkeypatch):
    assert groups_for_ddp(None, monkeypatch)["expt_dp_group"] == "the dp_cp group"


def test_a_module_with_experts_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="8 experts with tp=2, ep=2, etp=2 need expert groups"):
        groups_for_ddp(8, monkeypatch)


def test_a_run_with_global_groups_makes_one_as_before(monkeypatch):
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="new_group"):
        groups_for_ddp(8, monkeypatch)
