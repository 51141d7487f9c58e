# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host waits for nothing in whole steps of the program; tests/gpu has the production layers."""

from contextlib import nullcontext

import pytest

from megatron.core.rerun_state_machine import RerunStateMachine
from tests.unit_tests.examples.nemotron_vlm.loop.models import ANY_SIZE
from tests.unit_tests.examples.nemotron_vlm.loop.rows import ALLGATHER
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
