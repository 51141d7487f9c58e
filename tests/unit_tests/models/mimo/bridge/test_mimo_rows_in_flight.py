# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows between non-colocated modules; rows.py has whole runs, "one pipeline of both modules"."""

import pytest
import torch

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.rows_in_flight import RowsInFlight


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
