# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The colocated bridge's rank maps, gather groups and guards, for 8 ranks in one process."""

import itertools
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.comm.colocated_communicator import (
    ColocatedBridgeCommunicator,
    gather_groups,
)

ORDER = ("tp", "cp", "dp", "pp")


def grid_of(order=ORDER, **sizes) -> HyperCommGrid:
    return HyperCommGrid([sizes.get(dim, 1) for dim in order], list(order))


@pytest.fixture
def world_of_8(monkeypatch):
    """Grids see 8 ranks although there is one process."""
    monkeypatch.setenv("WORLD_SIZE", "8")


@pytest.mark.usefixtures("world_of_8")
class TestRankMaps:
    @pytest.mark.parametrize(
        ("source", "destination", "canonical", "coordinates"),
        [
            pytest.param(
                dict(tp=2, dp=4),
                dict(tp=2, cp=2, dp=2),
                {0: (0, 0), 1: (0, 1), 4: (1, 0), 5: (1, 1)},
                {2: (0, 0, 1), 3: (0, 1, 1), 6: (1, 0, 1), 7: (1, 1, 1)},
                id="fan-in",
            ),
            pytest.param(
                dict(tp=4, dp=2),
                dict(tp=1, cp=2, dp=4),
                {0: (0, 0), 2: (1, 0), 4: (2, 0), 6: (3, 0)},
                {1: (0, 0, 1), 3: (1, 0, 1), 5: (2, 0, 1), 7: (3, 0, 1)},
                id="fan-out",
            ),
            pytest.param(
                dict(tp=4, dp=2),
                dict(cp=2, pp=2, dp=2),
                {0: (0, 0), 2: (1, 0)},
                {1: (0, 0, 1), 3: (1, 0, 1)},
                id="pipeline",
            ),
        ],
    )
    def test_canonical_positions_and_coordinates(self, source, destination, canonical, coordinates):
        with patch.object(dist, "get_rank", return_value=0), _no_groups():
            bridge = ColocatedBridgeCommunicator(grid_of(**source), grid_of(**destination))
        assert bridge.rank_to_dest_pos == canonical
        tp = source["tp"]
        assert bridge.rank_to_src_pos == {rank: divmod(rank, tp) for rank in range(8)}

    @pytest.mark.parametrize(
        ("source", "destination", "groups"),
        [
            (dict(tp=2, dp=4), dict(tp=4, dp=2), [[0, 2], [1, 3], [4, 6], [5, 7]]),
            (dict(tp=2, dp=4), dict(tp=2, cp=2, dp=2), [[0, 2], [1, 3], [4, 6], [5, 7]]),
            (dict(tp=4, dp=2), dict(tp=2, dp=4), [[0, 2], [1, 3], [4, 6], [5, 7]]),
            (dict(tp=4, dp=2), dict(cp=2, dp=4), [[0, 2], [1, 3], [4, 6], [5, 7]]),
            (dict(tp=8, dp=1), dict(tp=2, cp=2, dp=2), [[0, 4], [2, 6], [1, 5], [3, 7]]),
            (dict(tp=8, dp=1), dict(cp=2, pp=2, dp=2), [[0, 2], [4, 6], [1, 3], [5, 7]]),
            (dict(tp=1, dp=8), dict(cp=2, pp=2, dp=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ],
        ids=str,
    )
    def test_gather_groups_cover_the_world_once(self, source, destination, groups):
        found = gather_groups(bridge_topology(grid_of(**source), grid_of(**destination)))
        assert found == groups
        assert sorted(itertools.chain(*found)) == list(range(8))

    def test_a_view_of_the_experts_changes_nothing(self):
        plain, with_experts = (grid_of(tp=2, cp=2, dp=2) for _ in range(2))
        view = ["expt_tp", "ep", "expt_dp", "pp"]
        with_experts.register_view("expert", [1, 4, 2, 1], view, shared_dims=["pp"])
        with patch.object(dist, "get_rank", return_value=0), _no_groups():
            bridge = ColocatedBridgeCommunicator(grid_of(tp=2, dp=4), with_experts)
        assert bridge.topology == bridge_topology(grid_of(tp=2, dp=4), plain)

    def test_rank_offset_shifts_every_rank(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "12")
        source = HyperCommGrid([2, 4], ["tp", "dp"], rank_offset=4)
        destination = HyperCommGrid([4, 2], ["tp", "dp"], rank_offset=4)
        topology = bridge_topology(source, destination)
        assert gather_groups(topology)[0] == [4, 6]
        assert topology.src[11][:2] == (3, 1)


@pytest.mark.usefixtures("world_of_8")
class TestGuards:
    @pytest.mark.parametrize(
        ("source", "destination", "message"),
        [
            (dict(tp=2, dp=2), dict(tp=2, dp=4), "must span same number of ranks.* 4, .* 8"),
            (dict(cp=2, dp=4), dict(dp=8), "src CP must be 1, got 2"),
            (dict(pp=2, dp=4), dict(dp=8), "src PP must be 1, got 2"),
            (
                dict(order=("tp", "ep", "dp"), ep=2, dp=4),
                dict(dp=8),
                r"source grid has dims \{'ep': 2\}",
            ),
            (dict(order=("tp",), tp=8), dict(dp=8), "must have 'dp' dimension"),
            (dict(dp=8), dict(order=("dp",), dp=8), "must have 'tp' dimension"),
        ],
    )
    def test_sizes(self, source, destination, message):
        with pytest.raises(ValueError, match=message):
            bridge_topology(grid_of(**source), grid_of(**destination))

    def test_rank_offset(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "9")
        with pytest.raises(ValueError, match="same rank offset.* 0, .* 1"):
            bridge_topology(grid_of(dp=8), HyperCommGrid([1, 8], ["tp", "dp"], rank_offset=1))


def _no_groups():
    """Construct bridges in one process: no group is made, so none is this rank's."""
    return patch.object(dist, "new_subgroups_by_enumeration", return_value=(None, None))
