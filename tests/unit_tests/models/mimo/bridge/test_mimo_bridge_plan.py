# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge's plan, without processes: every row arrives, once, with the least traffic."""

import itertools
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan, planned_rows
from megatron.core.models.mimo.bridge.plan import AtomRows, BlockPlan, plan_block
from megatron.core.models.mimo.bridge.topology import BridgeTopology, bridge_topology
from tests.unit_tests.test_token_layout import exchange_in_one_process

PRODUCTION = ("tp", "cp", "dp", "pp")
ORDERS = list(itertools.permutations(PRODUCTION))


@pytest.fixture(autouse=True)
def large_world(monkeypatch):
    """Grids of any size here fit in this world."""
    monkeypatch.setenv("WORLD_SIZE", "4096")


def grid_of(offset: int = 0, order=PRODUCTION, **sizes) -> HyperCommGrid:
    return HyperCommGrid([sizes.get(dim, 1) for dim in order], list(order), offset)


def topology_of(src_tp, src_dp, tp, cp, dp, pp, order=PRODUCTION, src_order=("tp", "dp")):
    return bridge_topology(
        grid_of(order=src_order, tp=src_tp, dp=src_dp),
        grid_of(order=order, tp=tp, cp=cp, dp=dp, pp=pp),
    )


def layouts(world: int):
    """Every pair of layouts of a world."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    for src_tp, tp, cp, pp in itertools.product(divisors, repeat=4):
        if world % (tp * cp * pp) == 0:
            yield src_tp, world // src_tp, tp, cp, world // (tp * cp * pp), pp


def topologies(world: int, every: int = 1):
    """Bridges of a world: every layout in production's order, and some in other orders of dims."""
    pick = random.Random(world)
    for layout in list(layouts(world))[::every]:
        yield topology_of(*layout)
        yield topology_of(*layout, pick.choice(ORDERS), pick.choice((("tp", "dp"), ("dp", "tp"))))


class Batch:
    """Rows of a batch, numbered through, and the CP rank that owns each."""

    def __init__(self, topology: BridgeTopology, counts: list[int]):
        self.topology, self.counts = topology, counts
        total = sum(counts)
        self.rows = torch.arange(total)
        self.owner = np.random.default_rng(total).integers(topology.dest_cp, size=total)
        self.bounds = [0, *itertools.accumulate(counts)]

    def of(self, atoms: range) -> torch.Tensor:
        return self.rows[self.bounds[atoms.start] : self.bounds[atoms.stop]]

    def known(self, atoms: range) -> AtomRows:
        counts = [self.counts[atom] for atom in atoms]
        rows = slice(self.bounds[atoms.start], self.bounds[atoms.stop])
        return AtomRows(counts, self.owner[rows])

    def routes(self, plan: BlockPlan, members: list[int]):
        """Forward and backward route of each member."""
        topology = self.topology
        both = [
            plan.routes(
                number,
                self.known(topology.encodes(rank)),
                self.known(topology.consumes(rank)),
            )
            for number, rank in enumerate(members)
        ]
        return [list(way) for way in zip(*both, strict=True)]


def consumed(topology: BridgeTopology, rank: int) -> range:
    return topology.consumes(rank) if topology.dest[rank].pp == 0 else range(0)


class TestOwnership:
    """The samples that a rank encodes, against the grids and against an exact solver."""

    @pytest.mark.parametrize("world", [6, 8, 12])
    def test_every_sample_is_encoded_once_by_each_tensor_rank(self, world):
        """Every rank is in one block."""
        for topology in topologies(world):
            assert sorted(itertools.chain(*topology.blocks)) == list(range(world))
            encoders = Counter(
                (atom, at.tp)
                for rank, at in topology.src.items()
                for atom in topology.encodes(rank)
            )
            src_tp = world // topology.src_dp
            assert set(encoders) == set(itertools.product(range(topology.atoms), range(src_tp)))
            assert set(encoders.values()) == {1}

    @pytest.mark.parametrize("world", [6, 8, 12, 24, 48])
    def test_ranks_have_as_much_of_what_they_consume_as_any_assignment_gives(self, world):
        for topology in topologies(world, every=1 + world // 6):
            had = np.zeros((topology.src_dp, topology.src_dp), dtype=int)
            each = topology.atoms // topology.src_dp
            for rank, at in topology.src.items():
                for part in range(topology.src_dp):
                    encoded = range(part * each, (part + 1) * each)
                    had[at.dp, part] += len(set(encoded) & set(consumed(topology, rank)))
            most = had[linear_sum_assignment(had, maximize=True)].sum()
            assert had[range(topology.src_dp), topology.parts].sum() == most


class TestGroups:
    @pytest.mark.parametrize(
        ("source", "destination", "message"),
        [
            (dict(cp=2, dp=4), dict(dp=8), "src CP must be 1, got 2"),
            (dict(pp=2, dp=4), dict(dp=8), "src PP must be 1, got 2"),
            (dict(order=("tp", "ep", "dp"), ep=2, dp=4), dict(dp=8), r"dims \{'ep': 2\}"),
        ],
    )
    def test_grids_that_allow_no_bridge_are_refused(self, source, destination, message):
        with pytest.raises(ValueError, match=message):
            bridge_topology(grid_of(**source), grid_of(**destination))


class TestDelivery:
    """A gradient that must not be used is -1. A rank receives what it needs and lacks, and nothing
    else."""

    @pytest.mark.parametrize("world", [6, 8, 12, 16])
    def test_all_layouts_of_a_world(self, world):
        pick = random.Random(world)
        for topology in topologies(world, every=world // 3 - 1):
            batch = Batch(topology, [pick.randrange(4) for _ in range(topology.atoms)])
            for members in topology.blocks:
                forward, backward = batch.routes(plan_block(topology, members), members)
                before = [batch.of(topology.encodes(rank)) for rank in members]
                wanted = [batch.of(consumed(topology, rank)) for rank in members]
                arrived = exchange_in_one_process(before, forward)
                assert all(map(torch.equal, arrived, wanted))
                owners = [torch.from_numpy(batch.owner)[rows] for rows in wanted]
                grads = [
                    torch.where(owner == topology.dest[rank].cp, rows, -1)
                    for rank, rows, owner in zip(members, wanted, owners, strict=True)
                ]
                returned = exchange_in_one_process(grads, backward)
                assert all(map(torch.equal, returned, before))
                for number, rank in enumerate(members):
                    kept = torch.isin(wanted[number], before[number])
                    owned = kept & (owners[number] == topology.dest[rank].cp)
                    assert sum(forward[number].recv_splits) == (~kept).sum()
                    assert sum(backward[number].recv_splits) == len(before[number]) - owned.sum()


class TestVolume:
    """The least that all ranks together need follows from the assignment of parts, whose optimum
    :class:`TestOwnership` holds."""

    @pytest.mark.parametrize("world", [8, 64, 512, 4096])
    def test_in_productions_order_no_rank_could_receive_less(self, world):
        """The encoder's TP groups lie within a DP index and stage, or there is one stage."""
        pick = random.Random(world)
        fitting = [
            layout
            for layout in layouts(world)
            if (layout[2] * layout[3]) % layout[0] == 0 or layout[5] == 1
        ]
        for layout in pick.sample(fitting, min(len(fitting), 40 if world < 4096 else 8)):
            topology = topology_of(*layout)
            each = topology.atoms // topology.src_dp
            assert sorted(topology.parts) == list(range(topology.src_dp))
            for rank in topology.src:
                needed = consumed(topology, rank)
                kept = len(set(needed) & set(topology.encodes(rank)))
                assert kept == min(len(needed), each), layout

    def test_replicas_share_the_sending(self):
        """Members that have the same atoms serve the same number of others, give or take one."""
        for topology in topologies(16, every=3):
            for crossing in plan_block(topology, topology.blocks[0]):
                served = Counter()
                for taker, givers in enumerate(crossing.giver):
                    others = givers[(givers >= 0) & (givers != taker)]
                    served.update(others.tolist())
                alike = defaultdict(list)
                for member, run in enumerate(crossing.before):
                    if run:
                        alike[run, crossing.copy[member]].append(served[member])
                for shares in alike.values():
                    assert max(shares) - min(shares) <= 1


def test_rows_of_microbatches_that_cross_the_bridge_at_once_are_joined():
    one, other = AtomRows(np.array([4, 0]), np.array([0, 0, 1, 1])), AtomRows(np.array([1, 2]))
    plans = [
        BatchPlan({"images": AtomRows([number], np.array([number]))}, {"images": rows})
        for number, rows in enumerate((one, one, other))
    ]
    found = planned_rows(plans, "images")
    assert (found.encoded.counts, found.encoded.owners.tolist()) == ([3], [0, 1, 2])
    assert found.by_microbatch == [4, 4, 3]
    assert found.consumed.counts.tolist() == [9, 2] and found.consumed.owners is None
