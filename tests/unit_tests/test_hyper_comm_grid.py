# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The grids of our modules: memberships against parallel_state."""

import functools
import random

import pytest

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel_state import RankGenerator

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


@pytest.fixture(autouse=True)
def large_world(monkeypatch):
    """See a world that any grid here fits in."""
    monkeypatch.setenv("WORLD_SIZE", "8192")


def grid_of(tp, cp, dp, pp, etp, ep, edp) -> HyperCommGrid:
    grid = HyperCommGrid([tp, cp, dp, pp], ["tp", "cp", "dp", "pp"])
    grid.register_view("expert", [etp, ep, edp, pp], EXPERT_DIMS, shared_dims=["pp"])
    return grid


@functools.lru_cache(None)
def reference(tp, ep, dp, pp, cp, token):
    """Groups of ``parallel_state`` with pp outermost."""
    return RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp").get_ranks(token)


class TestMembershipAgainstParallelState:
    @pytest.mark.parametrize("worlds", [range(1, 17), range(17, 65)], ids=str)
    def test_every_factorization_up_to_64_ranks(self, worlds):
        """Dense and expert groups equal those of RankGenerator, lists and order alike.

        Each dense factorization is seen with one of the experts: a view knows nothing of others.
        """
        for world in worlds:
            for pp in divisors(world):
                dense = triples(world // pp)
                for (tp, cp, dp), expert in zip(dense, reversed(dense), strict=True):
                    grid = grid_of(tp, cp, dp, pp, *expert)
                    etp, ep, edp = expert
                    for dims, token in EXPERT_TOKENS.items():
                        expected = reference(etp, ep, edp, pp, 1, token)
                        assert grid.get_rank_enum(list(dims), view="expert") == expected
                    for token in DENSE_TOKENS:
                        expected = reference(tp, 1, dp, pp, cp, token)
                        assert grid.get_rank_enum(token.split("-")) == expected

    @pytest.mark.parametrize("world", [8, 64, 4096])
    def test_an_expert_group_leaves_its_node_only_if_it_is_larger_than_one(self, world):
        """A node has 8 ranks; with expert TP, it is ep · etp ranks that stay together."""
        every = [
            (*dense, pp, *expert)
            for pp in divisors(world)
            for dense in triples(world // pp)[:1]
            for expert in triples(world // pp)
        ]
        for layout in random.Random(world).sample(every, min(len(every), 100)):
            grid, (etp, ep) = grid_of(*layout), layout[4:6]
            for dims in (["ep"], ["expt_tp", "ep"]):
                for group in grid.get_rank_enum(dims, view="expert"):
                    nodes = {rank // 8 for rank in group}
                    assert len(nodes) == 1 or len(nodes) <= etp * ep // 8, layout
