# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ranges of flattened parameters as boxes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.mimo.joint_optimizer.shards import _factory, _placed, boxes

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


def split_by_rows(key: str, data: torch.Tensor, replica, _) -> list[ShardedTensor]:
    """Split as Mamba's input projection is: rows of parts, the second by its own axis of ranks."""
    first, second = data.split([2, 4])
    return [
        ShardedTensor.from_rank_offsets(f"{key}.a", first, (0, 1, 2), replica_id=replica),
        ShardedTensor.from_rank_offsets(f"{key}.b", second, (0, 1, 3), replica_id=replica),
    ]


def views() -> list:
    whole = torch.randn(6, 5)
    return [
        ShardedTensor.from_rank_offsets("weight", whole, (0, 1, 2)),
        ShardedTensor.from_rank_offsets("weight", whole, (0, 2, 4), prepend_axis_num=1),
        ShardedTensorFactory("weight", whole, split_by_rows, torch.cat),
    ]


class TestFactory:
    @pytest.mark.parametrize("number", range(3), ids=["plain", "stacked", "split"])
    @pytest.mark.parametrize(("start", "stop"), [(0, 30), (3, 4), (7, 29), (9, 11), (10, 20)])
    def test_what_is_saved_is_loaded_and_lies_where_the_parameter_does(self, number, start, stop):
        view = views()[number]
        flat = view.data.flatten()[start:stop]
        placed = list(_placed(view, start, stop, flat.device))
        saved = _factory(placed, "exp_avg", flat, 0, is_loading=False)
        parts = saved.build()
        whole = [view] if number < 2 else view.build()
        for part in parts:
            source = next(w for w in whole if f"exp_avg.{w.key}" == part.key)
            origin = source.global_offset[source.prepend_axis_num :]
            axes = source.prepend_axis_num
            assert part.global_offset[:axes] == source.global_offset[:axes]
            places = tuple(
                slice(at - begin, at - begin + size)
                for at, begin, size in zip(
                    part.global_offset[axes:], origin, part.local_shape[axes:], strict=True
                )
            )
            assert torch.equal(part.data.view(part.local_shape[axes:]), source.data[places])
        assert sum(part.data.numel() for part in parts) == stop - start
        loading = _factory(placed, "exp_avg", torch.zeros_like(flat), 0, is_loading=True)
        assert all(part.data is None for part in loading.build())
        assert torch.equal(loading.merge_fn([part.data for part in parts]), flat)

    def test_elements_in_another_order_are_refused(self):
        def transposed(key, data, replica, _):
            return [ShardedTensor.from_rank_offsets(key, data.t().contiguous())]

        view = ShardedTensorFactory("weight", torch.randn(3, 2), transposed, torch.cat)
        with pytest.raises(ValueError, match="weight: .* another order"):
            list(_placed(view, 0, 6, torch.device("cpu")))
