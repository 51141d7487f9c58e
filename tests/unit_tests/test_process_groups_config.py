# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""ProcessGroupCollection.from_hyper_comm_grid: the ranks of each field, the number of groups."""

import contextlib
import random
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_groups_from_grid import groups_from_grid

ALWAYS_NONE = {"hcp", "inter_dist_opt", "dp_cp_ag", "expt_dp_ag", "gtp_remat", "expt_gtp_remat"}
ALL_FIELDS = {f.name for f in fields(ProcessGroupCollection)}
ORDER = "tp-cp-ep-dp-pp"
DENSE = dict(tp="tp", cp="cp", dp="dp", pp="pp", tp_cp="tp-cp", mp="tp-pp", tp_dp_cp="tp-dp-cp")
DENSE |= dict.fromkeys(("dp_cp", "intra_dp_cp", "dp_cp_gtp_remat"), "dp-cp")
EXPERTS = dict(ep="ep", expt_tp="tp", tp_ep="tp-ep")
EXPERTS |= dict.fromkeys(("expt_dp", "intra_expt_dp", "expt_dp_gtp_remat"), "dp")
EXPERTS |= dict.fromkeys(("tp_ep_pp", "tp_ep_pp_with_egtp_remat"), "tp-ep-pp")
"""Tokens of `parallel_state`'s dense and expert generators, by field."""


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def triples(n: int) -> list[tuple[int, int, int]]:
    """Ordered factorizations of ``n`` into three."""
    return [(a, b, n // a // b) for a in divisors(n) for b in divisors(n // a)]


def make_grid(tp=1, cp=1, dp=1, pp=1, expert=None, **kwargs) -> HyperCommGrid:
    """Make a grid; ``expert`` is [etp, ep, edp]."""
    grid = HyperCommGrid([tp, cp, dp, pp], ["tp", "cp", "dp", "pp"], **kwargs)
    if expert:
        names = ["expt_tp", "ep", "expt_dp", "pp"]
        grid.register_view("expert", [*expert, pp], names, shared_dims=["pp"])
    return grid


class RecordedGroups(contextlib.ExitStack):
    """Stands in for torch.distributed: a group is its sorted ranks, one rank looks on."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank, self.enumerations, self.freed = rank, [], []

    def __enter__(self):
        replacements = dict(
            new_subgroups_by_enumeration=self._subgroups,
            new_group=self._group,
            destroy_process_group=self.freed.append,
            get_rank=lambda: self.rank,
        )
        self.enter_context(patch.multiple(dist, **replacements))
        return self

    def _subgroups(self, enumeration, backend=None):
        self.enumerations.append(enumeration)
        mine = [sorted(g) for g in enumeration if self.rank in g]
        return (mine[0] if mine else None), None

    def _group(self, ranks, backend=None):
        self.enumerations.append([])  # whoever is in the group
        return list(ranks) if self.rank in ranks else None

    @property
    def calls(self) -> int:
        """Number of calls of ``new_group`` on this rank."""
        return sum(len(enumeration) or 1 for enumeration in self.enumerations)


def fields_of(rank: int, *args, instances: int = 1, **kwargs) -> dict:
    with RecordedGroups(rank):
        return groups_from_grid(make_grid(*args, **kwargs), instances)


@pytest.fixture(autouse=True)
def large_world(monkeypatch):
    """See a world that any grid here fits in."""
    monkeypatch.setenv("WORLD_SIZE", "64")


class TestFields:
    def test_optimizer_instances_split_the_data_parallel_ranks(self):
        groups = fields_of(5, tp=2, dp=4, expert=[1, 4, 2], instances=2)
        assert groups["intra_dp_cp"] == [5, 7]
        assert groups["intra_expt_dp"] == [5]
        assert groups["inter_dist_opt"] == [1, 5]
        assert groups["intra_dist_opt"] == [4, 5, 6, 7]
        assert groups["dp_cp"] == [1, 3, 5, 7]

    def test_optimizer_instances_that_experts_do_not_share_are_refused(self):
        grid = HyperCommGrid([2, 2, 1], ["dp", "tp", "pp"])
        grid.register_view("expert", [1, 2, 2, 1], ["expt_tp", "ep", "expt_dp", "pp"], ["pp"])
        with RecordedGroups(0) as groups, pytest.raises(ValueError, match="make dp the slowest"):
            groups_from_grid(grid, 2)
        assert groups.calls == 0
        with pytest.raises(ValueError, match="3 optimizer instances must divide dp = 4 ranks"):
            fields_of(0, dp=4, instances=3)

    @pytest.mark.parametrize("world", [8, 12, 16, 64])
    def test_ranks_are_those_of_parallel_state_with_pp_outermost(self, world):
        """Every layout has one of the experts. A missing field would make upstream fall back to a
        global group."""
        pick = random.Random(world)
        for pp in divisors(world):
            layouts = triples(world // pp)
            for (tp, cp, dp), (etp, ep, edp) in zip(layouts, reversed(layouts), strict=True):
                rank = pick.randrange(world)
                groups = fields_of(rank, tp, cp, dp, pp, [etp, ep, edp])
                dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
                experts = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=ORDER)
                for generator, tokens in ((dense, DENSE), (experts, EXPERTS)):
                    for field, token in tokens.items():
                        (expected,) = (g for g in generator.get_ranks(token) if rank in g)
                        assert groups[field] == sorted(expected), field
                assert groups["intra_dist_opt"] == list(range(world))
                assert set(groups) == ALL_FIELDS
                absent = {name for name, group in groups.items() if group is None}
                assert absent - {"embd", "pos_embd"} == ALWAYS_NONE
                first, last = groups["pp"][0], groups["pp"][-1]
                ends = sorted({first, last})
                assert groups["embd"] == (ends if rank in ends else None)
                assert groups["pos_embd"] == ([first] if rank == first else None)

    def test_a_grid_without_cp_has_one_cp_rank(self):
        with RecordedGroups(5):
            groups = groups_from_grid(HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]), 2)
        assert groups == fields_of(5, tp=2, dp=2, pp=2, instances=2)


class TestGroupCount:
    def test_fields_of_equal_ranks_share_a_group_but_not_with_gradients_nor_experts(self):
        with RecordedGroups(0):
            groups = groups_from_grid(make_grid(tp=2, dp=4, expert=[1, 2, 4]))
        assert groups["tp"] is groups["tp_cp"] is groups["mp"]
        assert groups["tp_dp_cp"] is groups["intra_dist_opt"]
        assert groups["ep"] is groups["tp_ep"] is groups["tp_ep_pp"]
        assert groups["dp"] == groups["dp_cp"] == groups["expt_dp"] == [0, 2, 4, 6]
        assert len({id(groups[field]) for field in ("dp", "dp_cp", "expt_dp")}) == 3
        assert groups["ep"] == groups["tp"] and groups["ep"] is not groups["tp"]

    def test_a_second_call_makes_no_group_and_destroy_frees_all(self):
        with RecordedGroups(0) as recorded:
            grid = make_grid(tp=2, dp=2)
            first = groups_from_grid(grid)
            made = len(recorded.enumerations)
            assert first["ep"] is first["expt_dp"] is None  # there is no view of experts
            assert all(first[name] is group for name, group in groups_from_grid(grid).items())
            assert len(recorded.enumerations) == made
            grid.destroy()
            grid.destroy()
        assert len(recorded.freed) == made > 0


@pytest.mark.parametrize(
    ("sizes", "dims", "message"),
    [
        ([2, 2], ["tp", "dp"], r"\['tp', 'dp'\] lacks \['pp'\]"),
        ([2, 1, 2, 2, 1], ["tp", "cp", "ep", "dp", "pp"], r"base dims \{'ep': 2\} multiply"),
    ],
)
def test_dims_that_a_module_cannot_have_are_refused(sizes, dims, message):
    with pytest.raises(ValueError, match=message):
        groups_from_grid(HyperCommGrid(sizes, dims))
