# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ranges of flattened parameters as boxes, and what is saved of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.mimo.joint_optimizer.shards import _param_state, _placed, boxes
from megatron.core.models.mimo.joint_optimizer.state import leaves
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def inside(box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))


@given(SHAPES, st.data())
def test_boxes_are_the_range_in_order(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    found = list(boxes(shape, start, stop))
    parts = [numbers[inside(box)].flatten().tolist() for box in found]
    assert sum(parts, []) == [*range(start, stop)]
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_elements_in_another_order_are_refused():
    def transposed(key, data, replica, _):
        return [ShardedTensor.from_rank_offsets(key, data.t().contiguous())]

    view = ShardedTensorFactory("weight", torch.randn(3, 2), transposed, torch.cat)
    with pytest.raises(ValueError, match="weight: .* another order"):
        list(_placed(view, 0, 6, torch.device("cpu")))


@requires_world_size(1)
def test_parameters_in_fp32_are_saved_as_they_are_stepped(monkeypatch):
    """Transformer Engine's Adam has copies of them beside its master weights, and steps none."""
    kept = DistributedOptimizer._get_main_param_and_optimizer_states

    def with_first_value(optimizer, parameter):
        found = kept(optimizer, parameter)
        return found | {"param": torch.zeros_like(found["param"])}

    monkeypatch.setattr(
        DistributedOptimizer, "_get_main_param_and_optimizer_states", with_first_value
    )
    with trainer() as run:
        run.train_step()
        (leaf, *_) = leaves(run.optimizer.module_infos["language"].optimizer)
        weights = [weight for group in leaf.model_fp32_groups for weight in group]
        views = {
            str(number): ShardedTensor.from_rank_offsets(str(number), weight, replica_id=(0, 0, 0))
            for number, weight in enumerate(weights)
        }
        saved = [parts["param"] for parts in _param_state(leaf, views).values()]
        assert len(saved) == len(weights) > 10
        for part in saved:
            weight = weights[int(part.key.rpartition(".")[2])]
            assert torch.equal(part.data, weight.flatten())
