# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""HyperCommGrid: memberships against parallel_state, misuse, and group ownership."""

import functools
import os
import random
import time
from unittest.mock import MagicMock, patch

import pytest
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel_state import RankGenerator
from megatron.core.rank_enumeration import GridError
from tests.unit_tests.test_utilities import Utils, requires_world_size

DENSE_TOKENS = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp", "tp-dp-cp")
# dims of the expert view -> the token of parallel_state's expert generator
EXPERT_TOKENS = {
    ("expt_tp",): "tp",
    ("ep",): "ep",
    ("expt_dp",): "dp",
    ("expt_tp", "ep"): "tp-ep",
    ("expt_tp", "ep", "pp"): "tp-ep-pp",
}
EXPERT_DIMS = ["expt_tp", "ep", "expt_dp", "pp"]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def triples(n: int) -> list[tuple[int, int, int]]:
    """Ordered factorizations of ``n`` into three."""
    return [(a, b, n // a // b) for a in divisors(n) for b in divisors(n // a)]


def layouts(world: int):
    """Every (tp, cp, dp, pp, etp, ep, edp) of a world."""
    for pp in divisors(world):
        for dense in triples(world // pp):
            for expert in triples(world // pp):
                yield (*dense, pp, *expert)


@pytest.fixture(autouse=True)
def large_world(request, monkeypatch):
    """Pure-logic tests see a world that any grid here fits in."""
    if "World8" not in request.node.nodeid:
        monkeypatch.setenv("WORLD_SIZE", "8192")


def dense_grid(tp, cp, dp, pp, **kwargs) -> HyperCommGrid:
    return HyperCommGrid([tp, cp, dp, pp], ["tp", "cp", "dp", "pp"], **kwargs)


def expert_grid(tp, cp, dp, pp, etp, ep, edp, **kwargs) -> HyperCommGrid:
    grid = dense_grid(tp, cp, dp, pp, **kwargs)
    grid.register_view("expert", [etp, ep, edp, pp], EXPERT_DIMS, shared_dims=["pp"])
    return grid


@functools.lru_cache(None)
def reference(tp, ep, dp, pp, cp, token):
    """Groups of ``parallel_state`` with pp outermost."""
    return RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp").get_ranks(token)


class TestMembershipAgainstParallelState:
    def test_every_factorization_up_to_64_ranks(self):
        """Dense and expert groups equal those of RankGenerator, lists and order alike."""
        cases = 0
        for world in range(1, 65):
            for tp, cp, dp, pp, etp, ep, edp in layouts(world):
                grid = expert_grid(tp, cp, dp, pp, etp, ep, edp)
                for dims, token in EXPERT_TOKENS.items():
                    expected = reference(etp, ep, edp, pp, 1, token)
                    assert grid.get_rank_enum(list(dims), view="expert") == expected
                cases += 1
            for pp in divisors(world):
                for tp, cp, dp in triples(world // pp):
                    grid = dense_grid(tp, cp, dp, pp)
                    for token in DENSE_TOKENS:
                        expected = reference(tp, 1, dp, pp, cp, token)
                        assert grid.get_rank_enum(token.split("-")) == expected
        assert cases > 8000

    @pytest.mark.parametrize("world", [8, 16, 32, 64, 512, 4096])
    def test_an_expert_group_leaves_its_node_only_if_it_is_larger_than_one(self, world):
        """A node has 8 ranks; with expert TP, it is ep · etp ranks that stay together."""
        every = list(layouts(world))
        for layout in random.Random(world).sample(every, min(len(every), 100)):
            grid, (etp, ep) = expert_grid(*layout), layout[4:6]
            for dims in (["ep"], ["expt_tp", "ep"]):
                for group in grid.get_rank_enum(dims, view="expert"):
                    nodes = {rank // 8 for rank in group}
                    assert len(nodes) == 1 or len(nodes) <= etp * ep // 8, layout

    def test_expert_and_pipeline_dims_meet_one_expert_rank_of_each_stage(self):
        grid = expert_grid(2, 1, 4, 2, 2, 2, 2)
        pp_of = {r: i for g in grid.get_rank_enum("pp") for i, r in enumerate(g)}
        for group in grid.get_rank_enum(["ep", "pp"], view="expert"):
            assert sorted(pp_of[r] for r in group) == [0, 0, 1, 1]

    def test_4096_ranks_take_less_than_a_second(self):
        start = time.perf_counter()
        grid = expert_grid(8, 4, 16, 8, 1, 128, 4)
        for dims, token in EXPERT_TOKENS.items():
            groups = grid.get_rank_enum(list(dims), view="expert")
            assert sorted(r for g in groups for r in g) == list(range(4096)), token
        elapsed = time.perf_counter() - start
        assert grid.get_rank_enum("ep", view="expert")[0] == list(range(128))
        assert grid.get_rank_enum(["expt_tp", "ep", "pp"], view="expert")[3] == [
            r for stage in range(8) for r in range(512 * stage + 384, 512 * stage + 512)
        ]
        assert elapsed < 1.0

    def test_offset_shifts_every_group(self):
        moved = expert_grid(2, 1, 2, 2, 1, 4, 1, rank_offset=24)
        base = expert_grid(2, 1, 2, 2, 1, 4, 1)
        for dims in (["ep"], ["expt_tp", "ep", "pp"]):
            shifted = [[r + 24 for r in g] for g in base.get_rank_enum(dims, view="expert")]
            assert moved.get_rank_enum(dims, view="expert") == shifted


class TestViews:
    def test_a_view_may_reuse_a_base_name_for_its_own_dim(self):
        grid = dense_grid(2, 1, 2, 1)
        grid.register_view("flat", [4, 1], ["dp", "tp"])
        assert grid.get_rank_enum("dp", view="flat") == [[0, 1, 2, 3]]
        assert grid.get_rank_enum("dp") == [[0, 2], [1, 3]]

    def test_shared_dim_with_other_members_is_refused(self):
        grid = dense_grid(2, 1, 2, 2)
        with pytest.raises(ValueError, match=r"'pp' groups \[0, 4\].*but \[0, 1\]"):
            grid.register_view("expert", [2, 4], ["pp", "ep"], shared_dims=["pp"])


class TestMisuse:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            (dict(shape=[2, 2], dim_names=["tp"]), r"len\(shape\) is 2 but len\(dim_names\) is 1"),
            (dict(shape=[2, 2], dim_names=["tp", "tp"]), r"repeat \['tp'\]"),
            (dict(shape=[2, 0], dim_names=["tp", "dp"]), r"positive integers, got \{'dp': 0\}"),
            (dict(shape=[8192, 2], dim_names=["tp", "dp"]), "over sized with world size 8192"),
            (dict(shape=[2], dim_names=["tp"], rank_offset=-1), "non-negative, got -1"),
        ],
    )
    def test_grid_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            HyperCommGrid(**arguments)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (dict(shape=[4], dim_names=["ep"]), "covers 4 ranks, the grid .* has 8"),
            (dict(shape=[2, 4], dim_names=["ep", "ep"]), r"repeat \['ep'\]"),
            (dict(shape=[8], dim_names=["ep"], shared_dims=["pp"]), "shared dim 'pp' must be in"),
        ],
    )
    def test_view_arguments(self, arguments, message):
        grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
        with pytest.raises(ValueError, match=message):
            grid.register_view("expert", **arguments)
        grid.register_view("expert", [8], ["ep"])

    def test_view_name_twice(self):
        grid = expert_grid(2, 1, 2, 1, 1, 4, 1)
        with pytest.raises(ValueError, match="'expert' is registered already"):
            grid.register_view("expert", [4], ["ep"])

    @pytest.mark.parametrize(
        "dims, view, message",
        [
            (["tp", "ep"], "expert", "'tp' is a dim of the base; one group cannot mix"),
            (["tp", "ep"], None, "'ep' is a dim of view 'expert'; one group cannot mix"),
            (["dp", "nope"], None, r"unknown dims \['nope'\]: .* \['tp', 'cp', 'dp', 'pp'\]"),
            (["dp", "dp"], None, r"repeat \['dp'\]"),
            ([], None, "at least one dim"),
            ("ep", "experts", r"'experts' is not registered: \['expert'\]"),
        ],
    )
    def test_dims_of_a_group(self, dims, view, message):
        grid = expert_grid(2, 1, 2, 2, 1, 4, 1)
        for call in (grid.get_rank_enum, grid.create_pg, grid.get_pg):
            with pytest.raises(ValueError, match=message):
                call(dims, view=view)

    def test_an_error_is_a_key_error_too_and_reads_as_plain_text(self):
        """Callers of upstream's grid catch KeyError for a group that is not there."""
        with pytest.raises(KeyError) as caught:
            dense_grid(1, 1, 1, 1).get_pg("tp")
        assert str(caught.value).startswith("Process group for tp hasn't been created")


@pytest.fixture
def made():
    """Groups that ``new_subgroups_by_enumeration`` was asked for, as (enumeration, group)."""
    calls = []

    def make(enumeration, backend=None, **kwargs):
        calls.append((enumeration, MagicMock(name=f"pg{len(calls)}")))
        return calls[-1][1], None

    with patch.object(dist, "new_subgroups_by_enumeration", side_effect=make):
        yield calls


class TestOwnership:
    def test_created_group_is_returned_again(self, made):
        grid = expert_grid(2, 1, 2, 2, 1, 4, 1)
        ep = grid.create_pg("ep", view="expert")
        assert grid.get_pg("ep", view="expert") is ep
        assert made[0][0] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_dims_in_another_order_are_the_same_group(self, made):
        grid = dense_grid(2, 2, 2, 1)
        assert grid.create_pg(["dp", "cp"]) is grid.get_pg(["cp", "dp"])

    def test_shared_dim_through_the_view_is_the_base_group(self, made):
        grid = expert_grid(2, 1, 2, 2, 1, 4, 1)
        assert grid.create_pg("pp") is grid.get_pg("pp", view="expert")
        with pytest.raises(ValueError, match="pp has already been created"):
            grid.create_pg("pp", view="expert")

    def test_creating_twice_is_refused(self, made):
        grid = dense_grid(2, 1, 2, 1)
        grid.create_pg(["tp", "dp"])
        with pytest.raises(ValueError, match=r"dp-tp has already been created.*\{'dp-tp': 1\}"):
            grid.create_pg(["dp", "tp"])
        assert len(made) == 1

    def test_derived_groups_stay_inside_the_grid(self, made):
        grid = dense_grid(2, 1, 2, 1, rank_offset=4)
        with pytest.raises(ValueError, match="need distinct ranks of 4…7"):
            grid.create_derived_pg("embd", [[3, 4]])
        with pytest.raises(ValueError, match="need distinct ranks"):
            grid.create_derived_pg("embd", [[4, 5], [5, 6]])
        assert grid.create_derived_pg("embd", [[4, 5]]) is grid.get_derived_pg("embd")

    def test_number_of_groups_is_reported(self, made):
        grid = expert_grid(2, 1, 2, 2, 1, 4, 1)
        grid.create_pg("tp")
        grid.create_pg("ep", view="expert")
        assert grid.group_counts == {"tp": 4, "expert:ep": 2}
        assert grid.num_groups == 6

    def test_dims_of_size_one_share_one_group_of_the_rank_alone(self, made):
        grid = dense_grid(2, 1, 2, 1, rank_offset=2)
        with patch.object(dist, "get_rank", return_value=3):
            assert grid.create_pg("cp") is grid.create_pg("pp")
            assert grid.create_derived_pg("first", [[2]]) is None
        assert [enumeration for enumeration, _ in made] == [[[2], [3], [4], [5]]]
        with patch.object(dist, "destroy_process_group") as free:
            grid.destroy()
        free.assert_called_once_with(made[0][1])

    def test_destroy_frees_every_group_once(self, made):
        grid = dense_grid(2, 1, 2, 1)
        grid.create_pg("tp")
        grid.create_pg("dp")
        with patch.object(dist, "destroy_process_group") as free:
            grid.destroy()
            grid.destroy()
        assert [c.args[0] for c in free.call_args_list] == [pg for _, pg in made]
        assert grid.num_groups == 0

    def test_destroy_after_a_failed_construction_frees_what_was_made(self, made):
        grid = dense_grid(2, 1, 2, 1)
        grid.create_pg("tp")
        with patch.object(dist, "new_subgroups_by_enumeration", side_effect=RuntimeError("store")):
            with pytest.raises(RuntimeError, match="store"):
                grid.create_pg("dp")
        with patch.object(dist, "destroy_process_group") as free:
            grid.destroy()
        free.assert_called_once_with(made[0][1])

    def test_a_failing_destroy_never_frees_a_group_again(self, made):
        grid = dense_grid(2, 1, 2, 1)
        grid.create_pg("tp")
        grid.create_pg("dp")
        with patch.object(dist, "destroy_process_group", side_effect=[RuntimeError, None]) as free:
            with pytest.raises(RuntimeError):
                grid.destroy()
            grid.destroy()
        assert [c.args[0] for c in free.call_args_list] == [pg for _, pg in made]


@requires_world_size(8)
class TestWorld8:
    def setup_method(self, method):
        Utils.initialize_distributed()

    def test_expert_groups_overlap_dense_ones_inside_their_stage(self):
        grid = expert_grid(2, 1, 2, 2, 1, 4, 1)
        dims = (("tp", None), ("pp", None), (["tp", "cp", "dp"], None), ("ep", "expert"))
        tp, pp, stage, ep = (
            set(dist.get_process_group_ranks(grid.create_pg(d, view=v))) for d, v in dims
        )
        assert tp < ep == stage
        assert ep & pp == {dist.get_rank()}
        grid.destroy()

    def test_ranks_outside_a_grid_take_part_and_get_none(self):
        """new_group is collective: both halves of the world create both grids' groups."""
        grids = [expert_grid(2, 1, 2, 1, 2, 2, 1, rank_offset=o) for o in (0, 4)]
        groups = [g.create_pg("ep", view="expert") for g in grids]
        mine = dist.get_rank() // 4
        assert [g.is_current_rank_in_grid() for g in grids] == [mine == 0, mine == 1]
        assert groups[1 - mine] is None
        assert groups[mine].size() == 2
        dist.barrier()  # no rank frees a group while another still connects to it
        for grid in grids:
            grid.destroy()

    def test_destroy_returns_the_process_to_the_default_group(self):
        before = len(dist.distributed_c10d._world.pg_map)
        grid = expert_grid(2, 2, 2, 1, 1, 8, 1)
        for dims in ("tp", "cp", "dp"):
            grid.create_pg(dims)
        grid.create_pg("ep", view="expert")
        dist.barrier()
        assert len(dist.distributed_c10d._world.pg_map) == before + 4
        grid.destroy()
        assert len(dist.distributed_c10d._world.pg_map) == before

    def test_world_size_comes_from_the_launcher(self):
        assert os.environ["WORLD_SIZE"] == "8"
        with pytest.raises(GridError, match="world size 8 "):
            HyperCommGrid([16], ["dp"])
