# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Whole steps: the host waits for nothing in them; one whose losses or gradients are not finite
changes no weight, and the error says which."""

from contextlib import nullcontext

import pytest
import torch

from megatron.core.rerun_state_machine import RerunStateMachine
from tests.unit_tests.examples.nemotron_vlm.loop.models import ANY_SIZE
from tests.unit_tests.examples.nemotron_vlm.loop.rows import ALLGATHER, APART
from tests.unit_tests.examples.nemotron_vlm.loop.sound_and_images import SoundAndImages
from tests.unit_tests.examples.nemotron_vlm.runs import SMALL, trainer
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import HAVE_CUDA, requires_world_size

SOUNDS = ("--model", "tiny-omni")
FP32 = pytest.mark.skipif(HAVE_CUDA, reason="grouped products of fp32 wait; tests/gpu has 16 bits")


@FP32
@pytest.mark.parametrize(
    ("encoder", "language", "more"),
    [
        pytest.param("dp=1", "dp=1", ANY_SIZE, marks=requires_world_size(1)),
        pytest.param("dp=1", "dp=1", SOUNDS, marks=requires_world_size(1)),
        pytest.param("tp=2,dp=2", "pp=2,dp=2,ep=2", ANY_SIZE, marks=requires_world_size(4)),
        pytest.param("tp=2,dp=2", "cp=2,dp=2,ep=2,etp=2", (), marks=requires_world_size(4)),
    ],
)
def test_the_host_waits_for_nothing_from_the_second_step_on(encoder, language, more, monkeypatch):
    """The first step makes plans and buffers; each ends in waits for its losses and gradients.

    There is no TP here: it compares random states of the host, which the guard takes for a wait.
    """
    line = ("--encoder", encoder, "--language", language, *more, *SMALL, *ALLGATHER)
    source, checked = SoundAndImages() if more is SOUNDS else None, []
    note = checked.append
    monkeypatch.setattr(RerunStateMachine, "validate_result", lambda _, *found, **__: note(found))
    with trainer(*line, "--num-workers", "1", source=source) as run:
        for step in range(2):
            run.train_step(no_host_sync if step else nullcontext)
    assert len(checked) in (2, 4)  # a first stage has gradients alone


ALONE = pytest.param((), marks=requires_world_size(1))
IN_PARTS = pytest.param(APART, marks=requires_world_size(2))

NO_RERUN = ("--rerun-mode", "disabled")
"""Otherwise Megatron repeats the step before it ends the run; e2e/test_faults.py has that."""


@pytest.mark.parametrize("options", [ALONE, IN_PARTS], ids=" ".join)
def test_a_gradient(options):
    """The gradient of one weight on each rank, in the first of its backwards alone."""
    with trainer(*options, *NO_RERUN) as run:
        run.train_step()
        weights = [weight for stage in run.stages for weight in stage.parameters()]
        before, calls = [weight.clone() for weight in weights], []

        def spoiled(gradient):
            calls.append(gradient)
            return gradient * float("inf") if len(calls) == 1 else gradient  # 0 · inf is NaN

        weights[0].register_hook(spoiled)
        with pytest.raises(RuntimeError, match="a gradient of this rank is NaN or Inf"):
            run.train_step()
        assert all(map(torch.equal, weights, before))


@requires_world_size(1)
def test_no_loss_is_kept_for_the_next_step():
    with trainer("--check-for-spiky-loss") as run:
        for _ in range(2):
            run.train_step()
            assert all(stage.step_losses == [] for stage in run.stages)


@requires_world_size(1)
@pytest.mark.parametrize("times", [2, 1, 0])
def test_experts_biases_move_once_in_a_step(times, monkeypatch):
    """However often Megatron repeats it; a step that it does not take (0) leaves them alone."""
    passes = iter([True] * max(1, times) + [False])
    machine = RerunStateMachine
    with trainer(*NO_RERUN) as run:
        named = run.stages[0].named_buffers()
        biases = [bias for name, bias in named if name.endswith("expert_bias")]
        before = torch.stack(biases)
        rate = run.config.moe_router_bias_update_rate
        with monkeypatch.context() as patch:
            patch.setattr(machine, "should_run_forward_backward", lambda *_: next(passes))
            if not times:
                patch.setattr(machine, "should_checkpoint_and_exit", lambda *_: (True, True, 16))
            run.train_step()
        moved = torch.stack(biases) - before
        expected = rate if times else 0.0
        assert moved.abs().max().item() == pytest.approx(expected)
        if times:
            assert moved.abs().min().item() in (0.0, pytest.approx(rate))
