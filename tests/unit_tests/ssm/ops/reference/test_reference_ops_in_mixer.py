# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's Mamba mixer on the reference ops, where mamba_ssm is not installed."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.ssm.ops.reference.stand_in import stand_in_for
from tests.unit_tests.ssm.mixers import HIDDEN, call, make_mixer
from tests.unit_tests.test_utilities import Utils, requires_world_size

WITHOUT_MAMBA_SSM = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is not None, reason="mamba_ssm is installed"
)


@pytest.fixture
def groups():
    Utils.initialize_distributed()
    group = dist.new_group([0])
    yield SimpleNamespace(tp=group, cp=group, tp_cp=group)
    dist.destroy_process_group(group)


@requires_world_size(1)
@WITHOUT_MAMBA_SSM
class TestMixer:
    def test_fused_and_separate_paths_agree(self, groups):
        """Outputs and gradients; fp32, 1e-5: the two add up the same terms in another order."""
        sizes = {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}
        fused, separate = (
            make_mixer(groups, **sizes, use_mamba_mem_eff_path=path) for path in (True, False)
        )
        separate.load_state_dict(fused.state_dict())
        hidden = torch.randn(40, 2, HIDDEN, device=Utils.device)
        outputs = [call(mixer, hidden, None) for mixer in (fused, separate)]
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
