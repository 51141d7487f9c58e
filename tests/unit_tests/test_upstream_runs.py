# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of upstream's own scripts compute with the patches what they compute without them."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.models.mimo.forward.encoding import encode
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.token_order import sample_of_each_token, sample_starts
from megatron.core.token_layout import PaddedLengths
from tests.unit_tests.test_utilities import Utils, requires_world_size


@pytest.fixture
def global_groups(monkeypatch):
    """Pretend to be in a run whose groups `parallel_state` has made."""
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: True)


@requires_world_size(2)
@pytest.mark.parametrize(("initialized", "gradient"), [(True, 3.0), (False, 1.0)])
def test_gradients_of_expert_parameters_are_summed_over_tp(initialized, gradient, monkeypatch):
    """They are with global groups, but not with a grid's, where expert-DP has summed them."""
    Utils.initialize_distributed()
    monkeypatch.setattr(parallel_state, "is_initialized", lambda: initialized)
    model = torch.nn.Linear(2, 2).to(Utils.device)
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    for parameter in model.parameters():
        parameter.sequence_parallel, parameter.allreduce = True, False
        parameter.main_grad = torch.full_like(parameter, 1.0 + Utils.rank)
    config = SimpleNamespace(sequence_parallel=True, qk_layernorm=False)
    world = torch.distributed.group.WORLD
    _allreduce_non_tensor_model_parallel_grads([model], config, world)
    expected = gradient if initialized else gradient + Utils.rank
    assert all((p.main_grad == expected).all() for p in model.parameters())


def test_ddp_makes_the_group_that_a_collection_lacks(global_groups, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks: tuple(ranks))
    fields = dict.fromkeys(("tp", "pp", "ep", "dp", "dp_cp"), "a group")
    groups = ProcessGroupCollection.setup_process_groups_for_ddp(
        ProcessGroupCollection(**fields, expt_dp=None),
        SimpleNamespace(num_moe_experts=8, tensor_model_parallel_size=2),
        DistributedDataParallelConfig(),
    )
    assert groups["expt_dp_group"] == (3,)


def test_packed_samples_that_nothing_tells_apart_are_taken(global_groups):
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
    assert sample_of_each_token(packed, tokens=8) is None


def test_empty_samples_reach_the_kernels_of_a_gated_delta_net(global_groups):
    packed = PaddedLengths((4, 0, 4), (4, 0, 4)).packed_seq_params(Utils.device)
    starts = sample_starts(packed, 8, 1, Utils.device)
    assert starts.tolist() == [0, 4, 4, 8]


def test_an_encoder_may_give_nothing():
    """Upstream's encoders do so for inputs without a known encoder."""
    nothing = torch.nn.Module()
    nothing.forward = lambda encoder_inputs: None
    model = SimpleNamespace(modality_submodules={"images": nothing}, colocated_comms={})
    assert encode(model, [{"images": {}}]) == {}
