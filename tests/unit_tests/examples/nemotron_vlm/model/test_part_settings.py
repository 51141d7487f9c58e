# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The encoder's and the projector's own learning rates and weight decay."""

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options.arguments import parse
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.models.mimo.one_step import PROPORTIONAL_STEP
from tests.unit_tests.models.mimo.weights import Weights, gather_weights
from tests.unit_tests.test_utilities import requires_world_size


def moves(*options: str) -> dict[str, Weights]:
    """Return how far a step moves each matrix, by part."""
    with trainer(*PROPORTIONAL_STEP, "--lr-decay-style", "constant", *options) as run:
        before = gather_weights(run.stages)
        run.train_step()
        after = gather_weights(run.stages)
    found: dict[str, Weights] = {"encoder": {}, "projector": {}, "language": {}}
    for name, weight in before.items():
        is_encoder, is_projector = ".encoders." in name, ".input_projections." in name
        part = "encoder" if is_encoder else "projector" if is_projector else "language"
        if weight.dim() > 1:
            found[part][name] = after[name] - weight
    return found


@requires_world_size(1)
def test_each_part_steps_by_its_own_learning_rate():
    common = moves()
    own = moves("--encoder-lr", "0", "--projector-lr", "3e6")
    for part, factor in (("encoder", 0.0), ("projector", 3.0), ("language", 1.0)):
        for name, move in common[part].items():
            torch.testing.assert_close(own[part][name], factor * move, rtol=1e-3, atol=1e-3)


@requires_world_size(1)
def test_weight_decay_of_one_part_leaves_the_others():
    rates = ("--encoder-lr", "1e-3", "--projector-lr", "1e-3", "--lr", "1e-3")
    common, own = moves(*rates), moves(*rates, "--projector-weight-decay", "0.5")
    assert all(torch.equal(move, own["encoder"][name]) for name, move in common["encoder"].items())
    assert all(not torch.equal(m, own["projector"][n]) for n, m in common["projector"].items())


def test_a_negative_rate_is_refused():
    with pytest.raises(UserError, match="--projector-lr must be 0 or more"):
        parse(["--projector-lr", "-1"], world_size=1)
