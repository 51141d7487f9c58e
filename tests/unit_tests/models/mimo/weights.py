# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Weights by global parameter name, to compare models of different layouts shard by shard.

The distributed checkpoint's view of a model says which part of which parameter a rank holds; so
tensor, expert and pipeline sharding need no rules here.
"""

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mimo.model.base import MimoModel

Weights = dict[str, torch.Tensor]
"""Whole parameters and persistent buffers, on the CPU."""


def local_shards(stages: list[MimoModel]) -> list[ShardedTensor]:
    """The parts that this rank's virtual stages hold; their data are the model's own tensors."""
    state = [stage.sharded_state_dict() for stage in stages]
    apply_factories(state)
    return [part for part in nested_values(state) if isinstance(part, ShardedTensor)]


def window(part: ShardedTensor) -> tuple[int | slice, ...]:
    """Return where a shard lies in its whole parameter; experts are counted along a first axis."""
    axes = part.prepend_axis_num
    starts = part.global_offset[axes:]
    slices = (slice(at, at + n) for at, n in zip(starts, part.local_shape, strict=True))
    return (*part.global_offset[:axes], *slices)


def gather_weights(stages: list[MimoModel]) -> Weights:
    """The whole model on every rank; a collective over the world.

    Raises:
        AssertionError: an element of a parameter is on no rank, as its first replica.
    """
    # Pickled without a clone, a view into DDP's buffer would take all of the buffer along.
    own = [
        (part.key, part.global_shape, window(part), part.data.detach().cpu().clone())
        for part in local_shards(stages)
        if not any(part.replica_id)
    ]
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    whole: Weights = {}
    for key, shape, place, data in (part for parts in by_rank for part in parts):
        whole.setdefault(key, torch.full(shape, torch.nan))[place] = data.float()
    missing = [key for key, weight in whole.items() if weight.isnan().any()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def assert_shards_equal(stages: list[MimoModel], weights: Weights) -> None:
    """Every shard of this rank, replicas included, has the bits of its window in ``weights``."""
    for part in local_shards(stages):
        assert torch.equal(part.data.cpu().float(), weights[part.key][window(part)]), part.key


def assert_shards_moved_alike(
    stages: list[MimoModel], before: Weights, after: Weights, tolerance: float
) -> None:
    """Assert that every shard of this rank went from ``before`` to ``after``.

    Args:
        tolerance: norm of a shard's error, relative to the norm of its parameter's whole move.
    """
    held = local_shards(stages)
    wrong = {}
    for part in held:
        error = (part.data.cpu().float() - after[part.key][window(part)]).norm()
        move = (after[part.key] - before[part.key]).norm()
        if not error <= tolerance * move:
            wrong[part.key] = f"{error / move:.1e}"
    assert not wrong, f"{len(wrong)} of {len(held)} shards moved otherwise; relative errors {wrong}"
