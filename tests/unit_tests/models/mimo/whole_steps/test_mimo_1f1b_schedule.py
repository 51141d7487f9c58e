# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Non-colocated encoder and language model, in one 1F1B pipeline, train like one rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from examples.mimo.common.layout import NON_COLOCATED
from examples.mimo.nemotron_vlm.data.sample import SampleSource, reading_task
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.rows_in_flight import RowsInFlight
from tests.unit_tests.examples.nemotron_vlm.runs import assert_same_trajectory_as_one_rank
from tests.unit_tests.models.mimo.small_vlm import PRESET
from tests.unit_tests.test_utilities import requires_world_size

SAMPLES, SEQUENCE = 24, 16
"""Number of samples in a step, and of tokens in a sample."""

SIX_LAYERS = replace(
    PRESET,
    encoder=replace(PRESET.encoder, layers=2),
    name="six-layers",
    language=replace(PRESET.language, hybrid_layer_pattern="ME*E*M"),
)
"""Language pp=2, 3 and 6 divide it, and encoder pp=2."""


class VariedStrips(SampleSource):
    """Samples of 0 to 4 tiles; half of each step's, at least one microbatch, have none."""

    def text(self, split, number):
        draw = np.random.default_rng([split == "test", number, 1])
        answer, tokens = draw.integers(10, size=2).tolist(), PRESET.encoder.tokens_per_tile
        return reading_task(len(self.tiles(split, number)), answer, tokens, SEQUENCE)

    def tiles(self, split, number):
        draw = np.random.default_rng([split == "test", number])
        tiles = int(draw.integers(5)) if number % SAMPLES >= SAMPLES // 2 else 0
        size = PRESET.encoder.tile
        return torch.from_numpy(draw.integers(256, size=(tiles, 3, size, size), dtype=np.uint8))


def assert_trains_like_one_rank(encoder: str, language: str, source) -> None:
    """Compare losses and gradient norms by step, of as many microbatches as stages, or two."""
    assert_same_trajectory_as_one_rank(
        *(encoder, language, "--placement", NON_COLOCATED),
        common=("--data", "mock", "--seq-length", str(SEQUENCE)),
        samples=SAMPLES,
        source=source,
        preset=SIX_LAYERS,
    )


varied = pytest.mark.parametrize("source", [None, VariedStrips()], ids=["even", "varied"])


@requires_world_size(4)
class TestFourRanks:
    @varied
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("dp=1", "pp=3,dp=1", id="pp-3"),
            pytest.param("pp=2", "pp=2,dp=1", id="encoder-pp-2"),
            pytest.param("dp=2", "tp=2,dp=1", id="fan-in-tp-2"),
            pytest.param("dp=2", "cp=2,dp=1", id="fan-in-cp-2"),
            pytest.param("tp=2", "dp=2,ep=2", id="fan-out-2"),
        ],
    )
    def test_trains_like_one_rank(self, encoder, language, source):
        assert_trains_like_one_rank(encoder, language, source)


@requires_world_size(2)
class TestTwoRanks:
    @varied
    def test_one_and_one(self, source):
        assert_trains_like_one_rank("dp=1", "dp=1", source)


@requires_world_size(8)
class TestEightRanks:
    @pytest.mark.parametrize(
        ("encoder", "language"),
        [
            pytest.param("tp=2", "tp=2,pp=3,dp=1", id="tp-2-to-tp-2-pp-3"),
            pytest.param("pp=2", "pp=6,dp=1", id="full-pp"),
            pytest.param("dp=4", "pp=2,cp=2,dp=1,ep=2,etp=1", id="fan-in-pp-2-cp-2-ep-2"),
            pytest.param("dp=4", "tp=2,cp=2,dp=1,ep=2,etp=1", id="fan-in-tp-2-cp-2-ep-2"),
            pytest.param("dp=4", "tp=2,pp=2,dp=1,ep=2,etp=1", id="fan-in-tp-2-pp-2-ep-2"),
        ],
    )
    def test_trains_like_one_rank(self, encoder, language):
        assert_trains_like_one_rank(encoder, language, VariedStrips())


class TestBridge:
    @pytest.mark.parametrize("is_source", [True, False])
    def test_a_grid_without_cp_has_one_cp_rank(self, is_source, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "8")
        grids = (
            HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]),
            HyperCommGrid([2, 1, 2, 2], ["tp", "cp", "dp", "pp"]),
        )
        without, with_one = (
            BridgeCommunicator.get_boundary_pp_stage_ranks(None, grid, is_source) for grid in grids
        )
        assert without == with_one


class TestRowsInFlight:
    def test_gradients_are_cut_where_rows_were_joined(self):
        rows = RowsInFlight()
        rows.note([(3, 8), (0, 8)], dim=0)
        rows.note([(1, 8), (2, 8)], dim=0)
        assert [len(part) for part in rows.split(torch.ones(3, 8), 2, dim=0)] == [3, 0]
        assert [len(part) for part in rows.split(torch.ones(3, 8), 2, dim=0)] == [1, 2]

    def test_without_a_backward_nothing_is_kept(self):
        rows = RowsInFlight()
        with torch.no_grad():
            rows.note([(3, 8)], dim=0)
        assert [len(part) for part in rows.split(torch.ones(4, 8), 2, dim=0)] == [2, 2]
