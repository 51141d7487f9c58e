# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The colocated bridge's exact values on 8 ranks, and its interface.

All values are small integers in floating point, so sums are exact in any order and tolerances 0.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.comm.colocated_communicator import (
    ColocatedBridgeCommunicator,
    SliceInfo,
    divides,
    gather_groups,
)
from tests.unit_tests.models.mimo.bridge.test_mimo_bridge_plan import (
    Batch,
    consumed,
    grid_of,
    topologies,
)
from tests.unit_tests.test_utilities import Utils, requires_world_size

FLAT = {"b": 0, "h": 1}
LAYOUTS = [
    (dict(tp=2, dp=4), dict(tp=2, cp=2, pp=2, dp=1)),
    (dict(tp=8, dp=1), dict(cp=2, pp=2, dp=2)),
    (dict(tp=8, dp=1), dict(tp=2, cp=4, dp=1)),
    (dict(tp=4, dp=2), dict(cp=2, dp=4)),
    (dict(tp=2, dp=4), dict(tp=2, dp=4)),
    (dict(dp=8), dict(order=("dp", "tp", "pp", "cp"), cp=2, pp=2, dp=2)),
    (dict(order=("tp", "dp"), tp=3, dp=2), dict(order=("tp", "dp", "pp"), tp=2, dp=3)),
    (dict(tp=2, dp=3), dict(tp=1, cp=3, dp=2)),
]
UNIFORM = [2] * 24
UNEVEN = [3, 0, 1, 5, 0, 0, 2, 7, 1, 1, 0, 4] + [2, 0, 0, 6, 1, 3, 0, 0, 5, 0, 1, 1]


def batch_on_rank(bridge: ColocatedBridgeCommunicator, samples: list[int]):
    """Return a batch of 24 samples, and the rows that this rank encodes and has on its stage.

    The batch is the same on every rank.
    """
    topology, rank = bridge.topology, dist.get_rank()
    of_atoms = np.reshape(samples, (topology.atoms, -1)).sum(1)
    batch = Batch(topology, of_atoms.tolist())
    return batch, batch.of(topology.encodes(rank)), batch.of(consumed(topology, rank))


def integers(rows: torch.Tensor, cp: int | torch.Tensor | None = None) -> torch.Tensor:
    """Return embeddings of rows, or their gradients on a CP rank or on one for each,
    `[rows, 3]`. A rank's power of two tells its gradient in a sum."""
    of_rank = 0 if cp is None else 1000 * 2 ** torch.as_tensor(cp)
    return torch.outer((rows + of_rank).double(), torch.arange(1.0, 4).double()).to(Utils.device)


@pytest.fixture
def make_bridge():
    """Bridges over fresh grids, all groups freed afterwards."""
    Utils.initialize_distributed()
    made = []

    def make(source, destination, **kwargs) -> ColocatedBridgeCommunicator:
        bridge = ColocatedBridgeCommunicator(grid_of(**source), grid_of(**destination), **kwargs)
        made.append(bridge)
        return bridge

    yield make
    dist.barrier()  # gloo: a rank that frees a group breaks peers that still connect to it
    for bridge in made:
        bridge.destroy()
        bridge.src_grid.destroy()
        bridge.dest_grid.destroy()


@requires_world_size(8)
@pytest.mark.parametrize(("source", "destination"), LAYOUTS, ids=str)
def test_rows_arrive_and_gradients_return(make_bridge, source, destination):
    """With owners, only an owner's gradient returns: that of any other CP rank is NaN here.

    Without owners, the sum over all CP ranks returns; equal samples need no counts.
    """
    bridge = make_bridge(source, destination, dim_mapping=FLAT)
    if not bridge.src_grid.is_current_rank_in_grid():
        return
    topology, rank = bridge.topology, dist.get_rank()
    own_cp = topology.dest[rank].cp
    for samples in (UNIFORM, UNEVEN, [0] * 24):
        batch, encoded, present = batch_on_rank(bridge, samples)
        owner = torch.from_numpy(batch.owner)
        known = [batch.known(run(rank)) for run in (topology.encodes, topology.consumes)]
        sums = sum(integers(encoded, cp) for cp in range(topology.dest_cp))
        given, is_own = integers(present, own_cp), owner[present] == own_cp
        owned = given.where(is_own.unsqueeze(1).to(Utils.device), torch.nan)
        cases = [(known, owned, integers(encoded, owner[encoded]))]
        cases += [([AtomRows(rows.counts) for rows in known], given, sums)]
        cases += [((), given, sums)] * (samples is UNIFORM)
        for rows, gradient, expected in cases:
            inputs = integers(encoded).requires_grad_()
            out = bridge.communicate(inputs, *rows)
            assert torch.equal(out, integers(present)), samples
            out.backward(gradient)
            assert torch.equal(inputs.grad, expected), samples


class TestGatherGroups:
    @pytest.fixture(autouse=True)
    def large_world(self, monkeypatch):
        """Grids of any size fit in this world."""
        monkeypatch.setenv("WORLD_SIZE", "4096")

    @pytest.mark.parametrize("world", [6, 8, 12])
    def test_every_rank_is_in_one_where_there_are_any(self, world):
        for topology in topologies(world):
            gathering = list(itertools.chain(*gather_groups(topology)))
            expected = divides(topology) and topology.src_dp != topology.dest_dp
            assert sorted(gathering) == (list(range(world)) if expected else [])


@requires_world_size(8)
class TestInterface:
    def test_the_batch_may_be_any_dim(self, make_bridge):
        bridge = make_bridge(dict(tp=2, dp=4), dict(tp=4, dp=2))
        _, encoded, present = batch_on_rank(bridge, UNIFORM)
        tensors = integers(encoded), integers(present)
        tensors += integers(present, 0), integers(encoded, 0)
        for batch_dim in (0, 1, 2):
            bridge.dim_mapping = {"b": batch_dim}
            x, out, grad, x_grad = (
                rows[:, :, None].expand(-1, -1, 2).movedim(0, batch_dim).contiguous()
                for rows in tensors
            )
            moved = bridge.communicate(x.requires_grad_())
            assert moved.is_contiguous()
            assert torch.equal(moved, out)
            moved.backward(grad)
            assert torch.equal(x.grad, x_grad)

    @pytest.mark.parametrize(
        ("destination", "slots"),
        [
            (dict(tp=1, cp=1, dp=8), [0, 1, 0, 1, 0, 1, 0, 1]),
            (dict(tp=2, cp=2, pp=2, dp=1), [0, 0, 1, 1, 2, 2, 3, 3]),
        ],
    )
    def test_slice_info(self, make_bridge, destination, slots):
        bridge = make_bridge(dict(tp=2, dp=4), destination)
        assert bridge.rank_to_src_pos == {rank: divmod(rank, 2) for rank in range(8)}
        first = {rank: at for rank, at in bridge.topology.dest.items() if at.cp == at.pp == 0}
        assert bridge.rank_to_dest_pos == {rank: at[:2] for rank, at in first.items()}
        size = 12 // bridge.scale
        assert bridge.get_slice_info(12) == SliceInfo(slots[dist.get_rank()] * size, size)

    def test_rows_that_do_not_fit_are_refused(self, make_bridge):
        fan_out = make_bridge(dict(tp=4, dp=2), dict(cp=2, dp=4), dim_mapping=FLAT)
        rows, two = torch.ones(3, 3, device=Utils.device), AtomRows([2])
        with pytest.raises(ValueError, match="3 rows are not divisible by fan_out: 2 equal"):
            fan_out.communicate(rows)
        with pytest.raises(ValueError, match="rows of 2 atoms are needed, got 3"):
            fan_out.communicate(rows, AtomRows([1, 1, 1]), two)
        with pytest.raises(ValueError, match="samples have 4 rows, but src has 3"):
            fan_out.communicate(rows, AtomRows([2, 2]), two)
        with pytest.raises(ValueError, match=r"below 2 for each of 3 rows .* got shape \(5,\)"):
            fan_out.communicate(rows, AtomRows([2, 1], np.zeros(5, int)), two)
        with pytest.raises(ValueError, match=r"with values 2…2"):
            fan_out.communicate(rows, AtomRows([2, 1]), AtomRows([2], np.full(2, 2)))
        same = make_bridge(dict(tp=2, dp=4), dict(tp=2, dp=4), dim_mapping=FLAT)
        with pytest.raises(ValueError, match="each of 4 equal parts .* they have 3 to 4[.]"):
            same.check_equal(3, 4, Utils.device)

    def test_unequal_rows_on_some_ranks_are_refused_on_all(self, make_bridge):
        """Ranks of the other DP index have nothing to do with the rows, and would go on alone."""
        fan_in = make_bridge(dict(dp=8), dict(cp=4, dp=2), dim_mapping=FLAT)
        fan_in.check_equal(3, 12, Utils.device)
        right = dist.get_rank() < 4
        with pytest.raises(ValueError, match="each of 8 equal parts .* they have 2.75 to 3[.]"):
            fan_in.check_equal(3, 12 if right else 11, Utils.device)
