# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one layout, loaded in another: the run goes on as if nothing had happened."""

from tests.unit_tests.examples.nemotron_vlm.runs import assert_same_trajectory, trainer
from tests.unit_tests.models.mimo.small_vlm import PRESET
from tests.unit_tests.test_utilities import requires_world_size

STEPS = 2
"""Steps in each layout. The second one after a load depends on Adam's loaded moments."""

LAYOUTS = [
    ("tp=2,dp=2", "tp=1,dp=4,ep=2"),
    ("tp=1,dp=4", "tp=2,dp=2,ep=4,etp=1"),
    ("tp=4,dp=1", "tp=1,dp=4,ep=4"),
]


def train(run) -> list[dict]:
    return [run.train_step() for _ in range(STEPS)]


class TestFourRanks:
    @requires_world_size(4)
    def test_training_goes_on_in_another_layout(self, shared_path):
        continued = []
        for number, (encoder, language) in enumerate(LAYOUTS):
            load = ("--load", str(shared_path)) if number > 0 else ()
            layout = ("--encoder", encoder, "--language", language)
            with trainer(*layout, *load, preset=PRESET) as run:
                continued += train(run)
                if number < len(LAYOUTS) - 1:
                    run.save(shared_path)
                if number == 0:
                    uninterrupted = continued + [r for _ in LAYOUTS[1:] for r in train(run)]
        assert [record["step"] for record in continued] == list(range(1, 7))
        assert_same_trajectory(continued, uninterrupted)
