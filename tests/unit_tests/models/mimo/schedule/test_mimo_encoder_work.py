# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The encoders' work around the language model's: reductions, and what is refused."""

import pytest

from examples.mimo.nemotron_vlm.model.encoders.stage import EncoderStage
from megatron.core.rerun_state_machine import RerunDataIterator
from tests.unit_tests.examples.nemotron_vlm.loop.rows import FLAT, OVERLAP, PIPELINE, Row
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size

TWO_ENCODERS = 4, "sound and images", "images:tp=2,dp=2 sound:dp=4"

pytestmark = requires_world_size(4)


@pytest.mark.parametrize("language", [PIPELINE, FLAT])
def test_encoders_that_some_ranks_do_not_run_reduce_after_the_backward(
    language, monkeypatch, record_property
):
    monkeypatch.setattr(EncoderStage, "runs_on_every_rank", False)
    check(Row(*TWO_ENCODERS, language, OVERLAP), record_property)


def without_plan(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "batch_plan"}


def test_unequal_samples_without_a_plan_are_refused_on_every_rank():
    layout = ("--encoder", "dp=4", "--language", PIPELINE)
    with trainer(*layout, "--global-batch-size", "4", "--micro-batch-size", "4") as run:
        run._batches = RerunDataIterator(map(without_plan, run.loading.training()))
        with pytest.raises(ValueError, match="equal parts of a batch must have"):
            run.train_step()
