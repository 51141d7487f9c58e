# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge's plan, without processes: every row arrives, once, with the least traffic."""

import itertools
import random
import time

import pytest
import torch

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.bridge_plan import BridgeRoute, plan_block
from megatron.core.models.mimo.comm.bridge_topology import bridge_topology


@pytest.fixture(autouse=True)
def large_world(monkeypatch):
    """Grids of any size here fit in this world."""
    monkeypatch.setenv("WORLD_SIZE", "4096")


def topology_of(src_tp: int, src_dp: int, tp: int, cp: int, pp: int, dp: int):
    src = HyperCommGrid([src_tp, src_dp], ["tp", "dp"])
    return bridge_topology(src, HyperCommGrid([tp, cp, pp, dp], ["tp", "cp", "pp", "dp"]))


def layouts(world: int):
    """Every pair of layouts of a world, one of whose DP sizes divides the other."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    for src_tp, tp, cp, pp in itertools.product(divisors, repeat=4):
        if world % (tp * cp * pp) == 0:
            src_dp, dp = world // src_tp, world // (tp * cp * pp)
            if src_dp % dp == 0 or dp % src_dp == 0:
                yield src_tp, src_dp, tp, cp, pp, dp


def all_to_all(routes: list[BridgeRoute], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What every member ends with, [copies, rows]; fails if a place is written twice or never."""
    sent = [
        tensor[route.send_places].split(route.send_splits)
        for route, tensor in zip(routes, tensors, strict=True)
    ]
    results = []
    for member, route in enumerate(routes):
        assert route.recv_splits == tuple(r.send_splits[member] for r in routes)
        places = torch.cat([route.recv_places, route.kept_to])
        assert torch.equal(places.sort().values, torch.arange(route.copies * route.rows))
        values = [*(messages[member] for messages in sent), tensors[member][route.kept_from]]
        moved = torch.empty(len(places), dtype=torch.int64)
        moved[places] = torch.cat(values)
        results.append(moved.view(route.copies, route.rows))
    return results


class TestDelivery:
    """Row i of a block holds the number i; a gradient that must not be used holds -1."""

    @pytest.mark.parametrize("uneven", [False, True])
    @pytest.mark.parametrize("world", [6, 8])
    def test_all_layouts_of_a_world(self, world, uneven):
        pick = random.Random(world)
        for layout in layouts(world):
            topology = topology_of(*layout)
            members = topology.blocks[-1]
            plan = plan_block(topology, members)
            slot_rows = [pick.randrange(4) if uneven else 3 for _ in range(topology.scale)]
            rows = sum(slot_rows)
            owner = torch.tensor([pick.randrange(topology.dest_cp) for _ in range(rows)]).long()
            by_slot = torch.arange(rows).split(slot_rows)

            def held(crossing_slots, by_slot=by_slot, rows=rows):
                return torch.cat([by_slot[s] for s in crossing_slots] or [torch.arange(0)])

            before = [held(slots) for slots in plan.forward.before]
            forward = [plan.forward.route(m, slot_rows) for m in range(len(members))]
            for rank, got, slots in zip(
                members, all_to_all(forward, before), plan.forward.after, strict=True
            ):
                assert (len(slots) > 0) == (topology.dest[rank].pp == 0), layout
                assert torch.equal(got, held(slots)[None]), layout

            grads = []
            for rank, slots in zip(members, plan.backward.before, strict=True):
                mine = held(slots)
                used = owner[mine] == topology.dest[rank].cp
                grads.append(torch.where(used, mine, -1))
            backward = [plan.backward.route(m, slot_rows, owner) for m in range(len(members))]
            for got, slots in zip(all_to_all(backward, grads), plan.backward.after, strict=True):
                assert torch.equal(got, held(slots)[None]), layout

    @pytest.mark.parametrize("layout", list(layouts(8)), ids=str)
    def test_without_owners_every_cp_rank_gives_one_addend(self, layout):
        topology = topology_of(*layout)
        members = topology.blocks[0]
        crossing = plan_block(topology, members).backward
        slot_rows = [2] * topology.scale
        grads = [
            torch.tensor([100 * topology.dest[rank].cp + 2 * s + i for s in slots for i in (0, 1)])
            for rank, slots in zip(members, crossing.before, strict=True)
        ]
        routes = [crossing.route(m, slot_rows) for m in range(len(members))]
        cp_ranks = 100 * torch.arange(topology.dest_cp)[:, None]
        results = all_to_all(routes, [g.long() for g in grads])
        for got, slots in zip(results, crossing.after, strict=True):
            assert torch.equal(got, cp_ranks + torch.arange(2 * slots.start, 2 * slots.stop))


class TestVolume:
    """Rows received, against the bounds; owners balanced, as zigzag makes them."""

    @pytest.mark.parametrize("chosen", [list(layouts(8)), list(layouts(64))[::40]], ids=[8, 64])
    def test_least_possible(self, chosen):
        for layout in chosen:
            src_tp, src_dp, tp, cp, pp, dp = layout
            topology = topology_of(*layout)
            fan_in, fan_out = max(src_dp // dp, 1), max(dp // src_dp, 1)
            members = topology.blocks[0]
            plan = plan_block(topology, members)
            per_slot = 2 * cp
            slot_rows = [per_slot] * topology.scale
            rows = sum(slot_rows)
            owner = torch.arange(rows) % cp
            forward = plan.forward.received_rows(slot_rows)
            backward = plan.backward.received_rows(slot_rows, owner)
            for rank, there, back in zip(members, forward, backward, strict=True):
                first_stage = topology.dest[rank].pp == 0
                assert there == (rows - rows // fan_in if first_stage else 0), layout
                kept = rows // fan_in
                assert back == kept - first_stage * kept // (cp * fan_out), layout

    @pytest.mark.parametrize(
        ("layout", "times_less"),
        [
            pytest.param((2, 4, 1, 2, 1, 4), 2, id="equal-cp2"),
            pytest.param((4, 2, 1, 4, 1, 2), 2, id="equal-cp4"),
            pytest.param((2, 4, 2, 2, 1, 2), 4, id="fan-in-2-cp2"),
            pytest.param((1, 8, 1, 2, 1, 4), 4, id="fan-in-2-cp2-tp1"),
            pytest.param((1, 8, 2, 2, 1, 2), 8, id="fan-in-4-cp2"),
        ],
    )
    def test_backward_against_all_reduce_of_padded_gradients(self, layout, times_less):
        topology = topology_of(*layout)
        crossing = plan_block(topology, topology.blocks[0]).backward
        slot_rows = [8] * topology.scale
        cp, rows = topology.dest_cp, sum(slot_rows)
        received = crossing.received_rows(slot_rows, torch.arange(rows) % cp)
        all_reduced = 2 * (cp - 1) / cp * rows
        assert max(received) * times_less <= all_reduced

    @pytest.mark.parametrize("layout", list(layouts(16)), ids=str)
    def test_replicas_share_the_sending(self, layout):
        """Members that give the same part serve the same number of others, give or take one."""
        topology = topology_of(*layout)
        for crossing in plan_block(topology, topology.blocks[0]):
            for part in range(crossing.giver.shape[1]):
                served = [
                    int((crossing.giver[:, part] == member).sum())
                    for member, gives in enumerate(crossing.gives)
                    if gives == part
                ]
                assert max(served) - min(served) <= 1

    @pytest.mark.parametrize(
        "layout",
        [
            pytest.param((4, 1024, 8, 8, 8, 8), id="fan-in-128"),
            pytest.param((512, 8, 8, 8, 8, 8), id="equal"),
            pytest.param((4096, 1, 8, 4, 4, 32), id="fan-out-32"),
        ],
    )
    def test_4096_ranks(self, layout):
        """A rank plans its own share in well under a second, and its peers agree with it."""
        topology = topology_of(*layout)
        assert sorted(itertools.chain(*topology.blocks)) == list(range(4096))
        assert topology.direction.value == "equal" or sorted(
            itertools.chain(*topology.gather_groups)
        ) == list(range(4096))
        members = topology.blocks[-1]
        plan = plan_block(topology, members)
        slot_rows = [16] * topology.scale
        owner = torch.arange(sum(slot_rows)) % topology.dest_cp
        plan.backward.giver, plan.forward.giver  # noqa: B018 - made once per run
        start = time.perf_counter()
        mine = plan.backward.route(len(members) - 1, slot_rows, owner)
        plan.forward.route(len(members) - 1, slot_rows)
        assert time.perf_counter() - start < 0.5
        for peer, count in enumerate(mine.recv_splits):
            if count:
                theirs = plan.backward.route(peer, slot_rows, owner)
                assert theirs.send_splits[len(members) - 1] == count
