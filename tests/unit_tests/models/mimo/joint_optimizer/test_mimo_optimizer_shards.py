# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ranges of flattened parameters as boxes, and what is saved of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.mimo.joint_optimizer.shards import _placed, boxes

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
        list(_placed(view, 0, 6))
