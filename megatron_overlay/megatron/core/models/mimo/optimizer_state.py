# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A module's optimizer in a distributed checkpoint.

Megatron keeps the settings of parameter groups, the loss scale and the format's name in the common
part of a checkpoint, which rank 0 writes. Here they are sharded objects of the module, written by
the first of its ranks, whichever that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.optimizer import MegatronOptimizer

if TYPE_CHECKING:
    from megatron.core.models.mimo.optimizer import ModuleOptimizerInfo
    from megatron.core.process_groups_config import ProcessGroupCollection

COMMON = ("param_groups", "param_state_sharding_type", "grad_scaler")
"""What is the same on all ranks of a module."""


def sharded_optimizer_state(
    name: str,
    info: ModuleOptimizerInfo,
    model_sharded_state_dict: dict,
    is_loading: bool,
    **kwargs,
) -> dict:
    """The state of the module ``name`` with its common part as sharded objects.

    Args:
        info: of the module, which this rank trains.
        model_sharded_state_dict, is_loading, kwargs: as for Megatron's optimizers.
    """
    state = info.optimizer.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
    replica = _replica_id(info.pg_collection)
    for number, part, _ in _parts(state, info.optimizer):
        suffix = f".{number}" if number else ""
        for field, value in _take_common(part).items():
            key = f"optimizer.mimo.{name}{suffix}.{field}"
            part[_placeholder(field)] = ShardedObject(key, value, (1,), (0,), replica_id=replica)
    return state


def restore_common_state(name: str, state: dict | list, optimizer: MegatronOptimizer) -> None:
    """Put the common part back where the module's optimizer looks for it, in place.

    Raises:
        ValueError: the parameter groups are not those of the optimizer.
    """
    for _, part, leaf in _parts(state, optimizer):
        found = {f: part.pop(_placeholder(f)) for f in COMMON if _placeholder(f) in part}
        groups = found.pop("param_groups", None)
        part.update(found)
        if groups is None:
            continue
        current = leaf.optimizer.state_dict()["param_groups"]
        if len(groups) != len(current):
            raise ValueError(
                f"the optimizer state of {name} has {len(groups)} parameter groups, the model "
                f"has {len(current)}: other parts of it are frozen, or have settings of their own"
            )
        for group, own in zip(groups, current, strict=True):
            group["params"] = own["params"]
        part.setdefault("optimizer", {})["param_groups"] = groups


def _parts(
    state: dict | list, optimizer: MegatronOptimizer
) -> Iterator[tuple[int, dict, MegatronOptimizer]]:
    """Number, state and optimizer of each member of a chain; a single member's state is bare."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, leaf in enumerate(chain):
        yield number, state if len(chain) == 1 else state[number], leaf


def _take_common(part: dict) -> dict:
    """Remove and return the common fields that ``part`` has; parameters stay out of the groups."""
    taken = {f: part.pop(f) for f in COMMON if part.get(f) is not None}
    inner = part.get("optimizer")
    if isinstance(inner, dict) and "param_groups" in inner:
        taken["param_groups"] = deepcopy(inner.pop("param_groups"))
        for group in taken["param_groups"]:
            group["params"] = []
        if not inner:
            del part["optimizer"]
    return taken


def _placeholder(field: str) -> str:
    return f"_mimo_{field}"


def _replica_id(groups: ProcessGroupCollection) -> tuple[int, int, int]:
    """All zero on one rank of the module."""
    return groups.tp.rank(), groups.pp.rank(), groups.dp_cp.rank()
