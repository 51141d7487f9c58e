# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Adam's state on the host between steps, and master weights in halves, change no bit of a run.

All layers are trained, Mamba-2's rates in fp32 among bf16 weights. Adam is a stand-in for
Transformer Engine's; tests/gpu has the engine's own.
"""

import pytest
import torch

from megatron.core import optimizer as factory
from megatron.core.models.mimo.joint_optimizer import leaf as leaf_optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.training import training
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.models.mimo.joint_optimizer.fused_adam import FusedAdam
from tests.unit_tests.test_utilities import requires_world_size

OPTIONS = """--bf16 --hybrid-layer-pattern ME*E --global-batch-size 8 --micro-batch-size 2
    --lr 1e-3""".split()
LAYOUTS = ("--encoder", "dp=2", "--language", "dp=2,ep=2"), ("--encoder", "tp=2", "--language", "pp=2")


@pytest.fixture
def engine(monkeypatch):
    """Return a function that chooses how Adam's state is kept, for runs that begin after it."""
    make = training.get_megatron_optimizer_config
    for module in (factory, distrib_optimizer):
        monkeypatch.setattr(module, "Adam", FusedAdam)
    monkeypatch.setattr(factory, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(factory, "is_te_min_version", lambda _: True)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    monkeypatch.setattr(leaf_optimizer, "MOST", 60_000)  # several parts

    def keep(fraction: float, in_halves: bool = True, moments: torch.dtype = torch.bfloat16):
        def config_of(args):
            config, overrides = make(args)
            config.use_precision_aware_optimizer = True
            config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
            config.store_param_remainders = in_halves
            config.exp_avg_dtype = config.exp_avg_sq_dtype = moments
            config.optimizer_cpu_offload = fraction > 0
            config.optimizer_offload_fraction = fraction or 1.0  # Megatron's default
            return config, overrides

        monkeypatch.setattr(training, "get_megatron_optimizer_config", config_of)

    return keep


def held(run) -> float:
    """Return the share of the parameters whose state is in memory of the host."""
    parts = [part for leaf in run.optimizer._leaves for part in leaf._in_parts.parts]
    on_host = sum(part.size for part in parts if part.held is not None)
    for part in parts:
        if part.held is not None:
            memory = part.held.untyped_storage().data_ptr()
            assert all(each.untyped_storage().data_ptr() == memory for each in part.tensors)
    return on_host / sum(part.size for part in parts)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def weights_of(run) -> list[torch.Tensor]:
    return [p.detach().clone() for stage in run.stages for p in stage.parameters()]


@requires_world_size(1)
@pytest.mark.parametrize("in_halves", [True, False], ids=["halves", "whole"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_steps_are_those_of_a_state_on_the_device(fraction, in_halves, engine):
    engine(0.0, in_halves=False)
    with trainer(*OPTIONS) as run:
        before = weights_of(run)
        losses = [run.train_step()["loss"] for _ in range(4)]
        expected = weights_of(run)
        trained = [
            not torch.equal(*pair)
            for pair in zip(before, expected, strict=True)
            if pair[0].dtype == torch.float32
        ]
        assert trained and all(trained)  # Mamba-2's rates
    engine(fraction, in_halves)
    with trainer(*OPTIONS) as run:
        assert [run.train_step()["loss"] for _ in range(4)] == losses
        assert held(run) == pytest.approx(fraction, abs=0.2)
        assert equal(weights_of(run), expected)


@requires_world_size(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0.5, True), (0.5, True)),
        ((1.0, True), (0.3, False)),
        ((0.0, False), (1.0, True)),
        ((0.0, True), (0.0, False)),
    ],
    ids=str,
)
def test_a_resumed_run_keeps_its_state_elsewhere(before, after, engine, shared_path):
    engine(*before)
    with trainer(*OPTIONS) as run:
        for _ in range(2):
            run.train_step()
        run.save(shared_path)
        losses = [run.train_step()["loss"] for _ in range(2)]
        expected = weights_of(run)
    engine(*after)
    with trainer(*OPTIONS, "--load", str(shared_path)) as run:
        assert held(run) == pytest.approx(after[0], abs=0.2)
        assert [run.train_step()["loss"] for _ in range(2)] == losses
        assert equal(weights_of(run), expected)
