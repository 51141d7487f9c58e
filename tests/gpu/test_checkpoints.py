# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run goes on from a checkpoint in other layers, layouts and placements as in its own."""

import pytest
import torch

from tests.gpu.rows import APART, ENGINE, LOCAL
from tests.unit_tests.examples.nemotron_vlm.runs import TOLERANCE, apart, trainer
from tests.unit_tests.test_utilities import requires_world_size

STEPS = 2
"""Steps before the checkpoint, and after it. The second one after it depends on Adam's moments."""


def layout(encoder: str, language: str, *options: str) -> tuple[str, ...]:
    return ("--encoder", encoder, "--language", language, *options)


ONE = layout("dp=1", "dp=1")
ON_ONE = [
    pytest.param((*ONE, *LOCAL), (*ONE, *ENGINE), id="local-to-engine"),
    pytest.param((*ONE, *ENGINE), (*ONE, *LOCAL), id="engine-to-local"),
]
ON_TWO = [
    pytest.param(
        layout("dp=2", "tp=2,ep=2,etp=1", *LOCAL),
        layout("tp=2", "pp=2", *ENGINE),
        id="local-to-engine-in-another-layout",
    ),
    pytest.param(
        layout("tp=2", "dp=2,ep=2", *ENGINE),
        layout("dp=2", "cp=2", *LOCAL),
        id="engine-to-local-in-another-layout",
    ),
    pytest.param(
        layout("dp=2", "pp=2", *ENGINE),
        layout("dp=1", "dp=1", *ENGINE, *APART),
        id="colocated-to-non-colocated",
    ),
    pytest.param(
        layout("dp=1", "dp=1", *ENGINE, *APART),
        layout("dp=2", "tp=2", *ENGINE),
        id="non-colocated-to-colocated",
    ),
]


def steps(run) -> list[dict]:
    return [run.train_step() for _ in range(STEPS)]


def check(saving, loading, path, record_property):
    """Go on from a checkpoint, and compare with the run that saved it and went on itself."""
    with trainer(*saving, "--micro-batch-size", "8") as run:
        steps(run)
        run.save(path)
        uninterrupted = steps(run)
    with trainer(*loading, "--micro-batch-size", "8", "--load", str(path)) as run:
        found = apart(steps(run), uninterrupted)
    record_property("found", found)
    assert max(found.values()) <= TOLERANCE, found


@requires_world_size(1)
@pytest.mark.parametrize(("saving", "loading"), ON_ONE)
def test_one_gpu_goes_on(saving, loading, shared_path, record_property):
    check(saving, loading, shared_path, record_property)


@requires_world_size(2)
@pytest.mark.parametrize(("saving", "loading"), ON_TWO)
def test_two_gpus_go_on(saving, loading, shared_path, record_property):
    check(saving, loading, shared_path, record_property)


def optimizer_state(run) -> list[torch.Tensor]:
    """Master weights, moments and step counts of this rank, in the optimizer's order."""
    found = []
    for name in sorted(run.optimizer.module_infos):
        module = run.optimizer.module_infos[name].optimizer
        for leaf in module.chained_optimizers if module else ():
            for group in leaf.optimizer.param_groups:
                for parameter in group["params"]:
                    state = leaf.optimizer.state[parameter]
                    # The engine counts steps by group, PyTorch by parameter.
                    count = torch.as_tensor(state.get("step", group.get("step")))
                    tensors = (count, parameter, state["exp_avg"], state["exp_avg_sq"])
                    found += [each.detach().cpu().clone() for each in tensors]
    return found


def check_bits(options, path):
    with trainer(*options) as run:
        steps(run)
        run.save(path)
        saved, after = optimizer_state(run), run.train_step()
    with trainer(*options, "--load", str(path)) as run:
        loaded = optimizer_state(run)
        assert len(loaded) == len(saved) > 10
        assert all(torch.equal(one, other) for one, other in zip(loaded, saved, strict=True))
        assert run.train_step()["loss"] == after["loss"]


@requires_world_size(1)
def test_one_gpu_resumes_adam_bit_for_bit(shared_path):
    check_bits((*ONE, *ENGINE, "--bf16", "--micro-batch-size", "8"), shared_path)


@requires_world_size(2)
def test_two_gpus_resume_adam_bit_for_bit(shared_path):
    options = layout("dp=2", "tp=2,ep=2,etp=1", *ENGINE)
    check_bits((*options, "--bf16", "--micro-batch-size", "8"), shared_path)
