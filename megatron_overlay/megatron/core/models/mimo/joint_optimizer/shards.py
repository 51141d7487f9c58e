# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Save a rank's shard of the distributed optimizer's state as boxes of the parameters.

A rank holds a range of each flattened parameter, and Megatron's checkpoints cannot store ranges. To
save in its fully reshardable format, Megatron therefore gathers whole parameters on every
data-parallel rank. But checkpoints can store boxes, and a range consists of few: the end of its
first row, whole rows, the start of its last row. So each rank saves, and later reads, exactly what
it holds, for any layout, and the files have the same format.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from megatron.core.models.mimo.joint_optimizer.leaf import LeafOptimizer

MODEL_SPACE = "fully_sharded_model_space"
"""Megatron's name for optimizer states that are parts of parameters."""


class Box(NamedTuple):
    """A block of a tensor: its offset and its size along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


Placed = tuple[ShardedTensor, Box, slice | Tensor]
"""A box of a range: the checkpoint's tensor it is in, the box, and its elements of the range."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements ``start`` to ``stop`` of a flattened tensor, in order.

    A tensor of n dims needs at most 2n - 1 boxes.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _of_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _of_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _of_row(shape, last, 0, stop - last * row)


def _of_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, sizes in boxes(shape[1:], start, stop):
        yield Box((row, *offset), (1, *sizes))


def number_parameters(optimizer: DistributedOptimizer) -> None:
    """Set each parameter's index in its group: fp32 parameters come first, then 16-bit ones.

    Megatron numbers them in the order of its buffers, which differs in a group that has both, as
    with Mamba-2's decay rates in fp32 and the norms of a model in bf16.
    """
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group, (full, half) in enumerate(groups):
        for place, param in enumerate([*full, *half]):
            optimizer.model_param_group_index_map[param] = (group, place)


def param_state(
    optimizer: "LeafOptimizer",
    model_sharded_state_dict: ShardedStateDict,
    is_loading: bool,
) -> dict[int, dict[str, ShardedTensorFactory]]:
    """Return the sharded state of this rank's pieces of parameters, in buffer order.

    Loading reads into new tensors in host memory, so the state stays unchanged until everything is
    read. Saving copies state of the host box by box, and leaves the device's to the writer.
    """
    kinds = (ShardedTensor, ShardedTensorFactory)
    found, _ = extract_matching_values(model_sharded_state_dict, lambda x: isinstance(x, kinds))
    views = {part.data: part for part in nested_values(found)}
    state = {}
    for param, start in shards_of(optimizer):
        if param not in views:
            raise ValueError(f"the model's state lacks a parameter of {tuple(param.shape)}")
        view, instance = views[param], optimizer.distributed_optimizer_instance_id
        replica = (*view.replica_id[:2], instance)  # each data-parallel rank has its own part
        for flats in optimizer.pieces_of(param, is_loading):
            stop = start + flats["param"].numel()
            placed = list(_placed(view, start, stop))
            state[len(state)] = {
                kind: _factory(placed, f"optimizer.state.{kind}", flat, replica, is_loading)
                for kind, flat in flats.items()
                if kind != "step"  # belongs to a parameter group, and is saved with it
            }
            start = stop
    return state


def shards_of(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield each parameter that has a shard on this rank, and the shard's first element."""
    for buffer in optimizer.gbuf_ranges:
        for bucket in itertools.chain.from_iterable(buffer.values()):
            for param, ranges in bucket["param_map"].items():
                yield param, ranges["param"].start


def _factory(
    placed: list[Placed],
    prefix: str,
    flat: Tensor,
    replica: ReplicaId,
    is_loading: bool,
) -> ShardedTensorFactory:
    """Make the factory of a range: boxes in the checkpoint, and one tensor in the optimizer.

    Args:
        is_loading: whether boxes have no data yet.
    """

    def build(key: str, flat: Tensor, replica: ReplicaId, _: None) -> list[ShardedTensor]:
        shards = []
        for part, box, places in placed:
            data = None if is_loading else flat[places]
            if data is not None and data.is_cpu:
                data = data.clone()  # training would change what a writing process reads
            # Boxes form no regular grid, to which the checkpoint could prepend axes: they have all.
            shape = (1,) * part.prepend_axis_num + box.shape
            shard = replace(
                part,
                key=f"{prefix}.{part.key}",
                data=None if is_loading else data.view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_offset=_moved(part, box),
                axis_fragmentations=None,
                replica_id=replica,
                prepend_axis_num=0,
            )
            shards.append(shard)
        return shards

    def merge(loaded: list[Tensor]) -> Tensor:
        merged = torch.empty(flat.shape, dtype=flat.dtype)
        for tensor, (_, _, places) in zip(loaded, placed, strict=True):
            merged[places] = tensor.flatten().to(merged)
        return merged

    return ShardedTensorFactory(f"{prefix}.{placed[0][0].key}", flat, build, merge, replica)


def _moved(part: ShardedTensor, box: Box) -> tuple[int, ...]:
    axes = part.prepend_axis_num
    own = (a + b for a, b in zip(part.global_offset[axes:], box.offset, strict=True))
    return (*part.global_offset[:axes], *own)


def _placed(
    view: ShardedTensor | ShardedTensorFactory,
    start: int,
    stop: int,
) -> Iterator[Placed]:
    """Yield the boxes of elements ``start`` to ``stop`` of this rank's (model-parallel) parameter.

    Raises:
        ValueError: a factory makes tensors that have the parameter's elements in another order.
    """
    if isinstance(view, ShardedTensor):
        for box, places in _with_places(view.local_shape, start, stop):
            yield view, box, slice(places.start - start, places.stop - start)
        return
    # Applied to element numbers, the factory shows which elements go where.
    numbers = torch.arange(view.data.numel(), device=view.data.device).view(view.data.shape)
    for part in nested_values(view.build_fn(view.key, numbers, view.replica_id, None)):
        own = part.data.flatten()
        if not bool((own[1:] > own[:-1]).all()):
            raise ValueError(f"{view.key}: a part has its elements in another order")
        ends = torch.tensor([start, stop], device=own.device)
        first, last = torch.searchsorted(own, ends).tolist()
        for box, places in _with_places(part.local_shape, first, last):
            inside = own[places] - start
            low, high = inside[0].item(), inside[-1].item()
            is_run = high - low == len(inside) - 1
            yield part.without_data(), box, slice(low, high + 1) if is_run else inside.cpu()


def _with_places(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, slice]]:
    found = list(boxes(shape, start, stop))
    ends = itertools.accumulate((prod(box.shape) for box in found), initial=start)
    for box, (first, last) in zip(found, itertools.pairwise(ends), strict=True):
        yield box, slice(first, last)
