# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Frozen parts stay as they are; that the others train as on one rank is in rows.py."""

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options.arguments import parse
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size

PARTS = ["encoder", "encoder,projector", "language"]


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a module's parameters and persistent buffers, by name."""
    return {n: t.clone() for n, t in module.state_dict().items() if torch.is_tensor(t)}


def gradients(*arguments: str) -> dict[str, torch.Tensor]:
    """Gradients of the first batch, by name."""
    with trainer(*arguments, "--micro-batch-size", "32") as run:
        run.forward_backward()
        (stage,) = run.stages
        return {
            name: parameter.main_grad.clone()
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }


class TestCommandLine:
    @pytest.mark.parametrize(
        ("parts", "text"),
        [("radio", "no such part"), ("encoder,projector,language", "nothing to train")],
    )
    def test_refuses(self, parts, text):
        with pytest.raises(UserError, match=text):
            parse(["--freeze", parts], world_size=1)


class TestFreezing:
    @requires_world_size(1)
    @pytest.mark.parametrize("parts", PARTS)
    def test_frozen_parameters_and_buffers_stay(self, parts):
        with trainer("--freeze", parts, "--micro-batch-size", "32") as run:
            (stage,) = run.stages
            trained = {
                name.replace(".module.", ".", 1)  # DDP's, which state_dict leaves out
                for name, parameter in stage.named_parameters()
                if parameter.requires_grad
            }
            before = tensors(stage)
            run.train_step()
            moved = {name for name, t in tensors(stage).items() if not t.equal(before[name])}
        biases = {name for name in before if name.endswith("expert_bias")}
        assert biases
        assert moved == trained | (set() if parts == "language" else biases)

    @requires_world_size(1)
    @pytest.mark.parametrize(
        ("kinds", "coefficient"), [("seq_aux_loss", "1e-2"), ("aux_loss global_aux_loss", "1e-2 1")]
    )
    @pytest.mark.parametrize("parts", ["language", "encoder"])
    def test_balancing_losses_train_a_language_model_that_is_trained(
        self, kinds, coefficient, parts
    ):
        """A frozen one leaves projector and encoder the gradients of the loss alone."""
        options = ("--freeze", parts, "--moe-router-load-balancing-type", *kinds.split())
        zero = ["0"] * len(kinds.split())
        alone = gradients(*options, "--moe-aux-loss-coeff", *zero)
        losses = ("--moe-aux-loss-coeff", *coefficient.split(), "--moe-z-loss-coeff", "1e-2")
        balanced = gradients(*options, *losses)
        apart = {name for name, gradient in alone.items() if not gradient.equal(balanced[name])}
        assert alone.keys() == balanced.keys()
        if parts == "language":
            assert not apart
        else:
            assert any("input_projections" in name for name in apart)
