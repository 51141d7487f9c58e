# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's Mamba mixer on the reference ops, where mamba_ssm is not installed."""

import importlib.util

import pytest
import torch

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.ops.reference.stand_in import stand_in_for
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.test_utilities import Utils, requires_world_size

WITHOUT_MAMBA_SSM = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is not None, reason="mamba_ssm is installed"
)


@pytest.fixture
def groups():
    Utils.initialize_distributed()
    grid = HyperCommGrid([1, 1, Utils.world_size, 1], ["tp", "cp", "dp", "pp"])
    yield ProcessGroupCollection.from_hyper_comm_grid(grid)
    grid.destroy()


def make_mixer(groups: ProcessGroupCollection, use_mamba_mem_eff_path: bool) -> MambaMixer:
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        mamba_num_heads=8,
        mamba_head_dim=8,
        mamba_num_groups=2,
        mamba_state_dim=8,
        use_cpu_initialization=True,
        use_mamba_mem_eff_path=use_mamba_mem_eff_path,
    )
    submodules = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return MambaMixer(config, submodules, config.hidden_size, pg_collection=groups)


@requires_world_size(1)
@WITHOUT_MAMBA_SSM
class TestMixer:
    def test_fused_and_separate_paths_agree(self, groups):
        """Outputs and gradients; fp32, 1e-5: the two add up the same terms in another order."""
        fused, separate = (make_mixer(groups, path) for path in (True, False))
        separate.load_state_dict(fused.state_dict())
        hidden = torch.randn(40, 2, 32, device=Utils.device)
        outputs = [mixer.to(Utils.device)(hidden)[0] for mixer in (fused, separate)]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
        for output in outputs:
            output.square().mean().backward()
        for (name, got), expected in zip(
            fused.named_parameters(), separate.parameters(), strict=True
        ):
            error = (got.grad - expected.grad).norm() / expected.grad.norm()
            assert error < 1e-5, name


class TestStandIn:
    def test_broken_installation_is_refused(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        stand_in_for.cache_clear()
        with pytest.raises(ImportError, match="mamba_ssm is installed"):
            stand_in_for("mamba_ssm", "Mamba layers")

    @WITHOUT_MAMBA_SSM
    def test_is_said_once(self, caplog):
        stand_in_for.cache_clear()
        stand_in_for("mamba_ssm", "Mamba layers")
        stand_in_for("mamba_ssm", "Mamba layers")
        assert len(caplog.records) == 1
