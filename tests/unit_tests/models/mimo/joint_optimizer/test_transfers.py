# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients and weights that move by kept slices are those that upstream's methods move."""

import pytest
import torch

from megatron.core.models.mimo.joint_optimizer.leaf import LeafOptimizer
from tests.unit_tests.examples.nemotron_vlm.runs import SMALL, trainer
from tests.unit_tests.test_utilities import requires_world_size

FP16 = """--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 4096
    --hysteresis 1""".split()
LAYOUT = (*SMALL, "--encoder", "dp=4", "--language", "tp=2,dp=2,ep=2,etp=1")


def weights_after_steps(*options: str) -> tuple[list[torch.Tensor], list[float | None], bool]:
    """Return this rank's weights, the gradient norms, and whether all slices were kept."""
    with trainer(*LAYOUT, *options) as run:
        norms = [run.train_step()["grad_norm"] for _ in range(3)]
        weights = [p.detach().clone() for stage in run.stages for p in stage.parameters()]
        leaves = run.optimizer._leaves
        copies = [copy for leaf in leaves for copy in getattr(leaf, "_weights", None) or []]
        for destinations, sources in copies:
            assert len({to.dtype for to in destinations}) == len({of.dtype for of in sources}) == 1
        return weights, norms, all(getattr(leaf, "_gradients", None) for leaf in leaves)


@requires_world_size(4)
@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        (("--bf16",), True),
        (FP16, True),
        (("--bf16", "--grad-reduce-in-bf16"), False),
    ],
    ids=["bf16", "fp16-with-a-skipped-step", "bf16-sums"],
)
def test_weights_are_those_of_upstreams_transfers(options, is_kept, monkeypatch):
    weights, norms, was_kept = weights_after_steps(*options)
    monkeypatch.setattr(LeafOptimizer, "keeps_slices", False)
    expected, expected_norms, _ = weights_after_steps(*options)
    assert norms == expected_norms and was_kept == is_kept
    assert all(torch.equal(own, other) for own, other in zip(weights, expected, strict=True))
