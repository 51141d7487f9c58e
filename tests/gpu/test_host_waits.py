# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host waits for nothing in whole steps of the production path, by CUDA's own report."""

from contextlib import nullcontext

import pytest

from megatron.core.rerun_state_machine import RerunStateMachine
from tests.unit_tests.examples.nemotron_vlm.loop.models import ANY_SIZE, BF16, ENGINE
from tests.unit_tests.examples.nemotron_vlm.loop.rows import ALLGATHER
from tests.unit_tests.examples.nemotron_vlm.runs import LOCAL, trainer
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import requires_world_size


@pytest.mark.parametrize(
    "layers",
    [ENGINE, LOCAL, (*ENGINE, *ANY_SIZE), (*LOCAL, *ANY_SIZE)],
    ids=["engine", "local", "engine-any-size", "local-any-size"],
)
@pytest.mark.parametrize(
    ("encoder", "language"),
    [
        pytest.param("dp=1", "dp=1", marks=requires_world_size(1)),
        pytest.param("dp=2", "dp=2,ep=2", marks=requires_world_size(2)),
        pytest.param("dp=2", "tp=2,ep=2,etp=1", marks=requires_world_size(2)),
    ],
)
def test_the_host_waits_for_nothing_from_the_third_step_on(layers, encoder, language, monkeypatch):
    """The first steps make plans and buffers, and load and tune kernels; each ends in waits for its
    losses and gradients.
    """
    monkeypatch.setattr(RerunStateMachine, "validate_result", lambda *_, **__: None)
    layout = ("--encoder", encoder, "--language", language, "--num-workers", "1")
    with trainer(*layout, *layers, *BF16, *ALLGATHER) as run:
        for step in range(4):
            run.train_step(no_host_sync if step > 1 else nullcontext)
