# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Save and load one module's optimizer in a distributed checkpoint.

Megatron keeps the settings of parameter groups, the loss scale and the format's name in the common
part of a checkpoint, which rank 0 writes. Here they are sharded objects of the module, written by
the module's first rank. There is one set for the module instead of one each for its dense and
expert optimizers, as the layout decides whether experts have an optimizer of their own.
"""

import itertools
from copy import deepcopy

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.mimo.joint_optimizer.shards import MODEL_SPACE, number_parameters
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys
from megatron.core.process_groups_config import ProcessGroupCollection

COMMON = ("param_groups", "param_state_sharding_type", "grad_scaler")
"""Fields of the state that are the same on all ranks of a module."""

SHARDING = "distrib_optim_sharding_type"
"""Metadata key of the format's name."""

OWN_OF_LAYOUT = ("params", "is_expert_parallel")
"""Fields of a parameter group that depend on the layout."""

OWN_OF_RUN = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Fields of a parameter group that a resumed run may have changed, and which tell groups apart."""

OF_ADAM = ("betas", "eps")
"""Fields of a parameter group that are the run's in any case."""

Group = dict[str, object]


def sharded_optimizer_state(
    name: str,
    optimizer: MegatronOptimizer,
    groups: ProcessGroupCollection,
    model_sharded_state_dict: dict,
    is_loading: bool,
    **kwargs,
) -> dict:
    """Return the optimizer state of module ``name``, with its common part as sharded objects.

    Whatever format the metadata names, the state is saved in the one that fits every layout.
    """
    metadata = kwargs.get("metadata") or {}
    distributed = [leaf for leaf in leaves(optimizer) if isinstance(leaf, DistributedOptimizer)]
    if distributed:
        kwargs["metadata"] = metadata | {SHARDING: MODEL_SPACE}
    for leaf in distributed:
        number_parameters(leaf)
    if not is_loading:
        _allocate(optimizer)
    state = optimizer.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
    replica = groups.tp.rank(), groups.pp.rank(), groups.dp_cp.rank()  # (0, 0, 0) on one rank
    parts = _parts(state, optimizer)
    taken = [_take_common(part) for part, _ in parts]
    common = {field: value for fields in reversed(taken) for field, value in fields.items()}
    common["param_groups"] = _distinct([fields.get("param_groups", []) for fields in taken])
    _agree_on_step(common["param_groups"], groups)
    for field, value in common.items():
        key = f"optimizer.mimo.{name}.{field}"
        parts[0][0][_placeholder(field)] = ShardedObject(key, value, (1,), (0,), replica_id=replica)
    return state


def leaves(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, or ``optimizer`` itself if it is not a chain."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _allocate(optimizer: MegatronOptimizer) -> None:
    """Allocate the state that Adam makes at its first step, for a save before that step.

    A step with learning rate and weight decay 0 allocates it; weights stay as they are.
    """
    for leaf in leaves(optimizer):
        if not isinstance(leaf, DistributedOptimizer) or leaf.optimizer.state:
            continue
        groups = leaf.optimizer.param_groups
        settings = [(group["lr"], group["weight_decay"]) for group in groups]
        for group in groups:
            group["lr"] = group["weight_decay"] = 0.0
        leaf._init_optimizer_states_with_dummy_values()
        for group, (lr, weight_decay) in zip(groups, settings, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay
            if "step" in group:
                group["step"] = 0
        for state in leaf.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()


def _agree_on_step(param_groups: list[Group], groups: ProcessGroupCollection) -> None:
    """Give every group the number of steps taken: the maximum over ``intra_dist_opt``. Collective.

    Ranks without parameters in a group have not counted its steps.
    """
    counted = max((group.get("step") or 0 for group in param_groups), default=0)
    step = torch.tensor(int(counted), device=torch.cuda.current_device())
    dist.all_reduce(step, op=dist.ReduceOp.MAX, group=groups.intra_dist_opt)
    for group in param_groups:
        if step or "step" in group:
            group["step"] = int(step)


def restore_common_state(
    name: str, state: dict | list, optimizer: MegatronOptimizer, takes_rates: bool
) -> None:
    """Put the common part back where the module's optimizers look for it, in place.

    Args:
        takes_rates: take learning rates and weight decay from the state instead of keeping this
            run's. Groups that differ only in their rates are then matched in the order of their
            rates; otherwise they have the same state, and a run may have more or fewer of them.

    Raises:
        ValueError: the optimizer has a parameter group that the state lacks.
    """
    parts = _parts(state, optimizer)
    first = parts[0][0]
    found = {f: first.pop(_placeholder(f)) for f in COMMON if _placeholder(f) in first}
    groups = found.pop("param_groups", None)
    for part, leaf in parts:
        part.update(deepcopy(found))
        if "param_state_sharding_type" in part:
            part["param_state_sharding_type"] = MODEL_SPACE  # files of both formats are the same
        if groups is not None:
            numbers, current = itertools.count(), leaf.optimizer.param_groups
            current = [{**g, "params": [next(numbers) for _ in g["params"]]} for g in current]
            restored = _restored(name, groups, current, takes_rates)
            part.setdefault("optimizer", {})["param_groups"] = restored
            for group, loaded in zip(leaf.optimizer.param_groups, restored, strict=True):
                # Megatron identifies groups by their rates too.
                group.update({key: loaded[key] for key in OWN_OF_RUN if key in loaded})


def _parts(
    state: dict | list, optimizer: MegatronOptimizer
) -> list[tuple[dict, MegatronOptimizer]]:
    """Return the state and optimizer of each member of a chain; a single member's state is bare."""
    chain = leaves(optimizer)
    if len(chain) == 1:
        return [(state, chain[0])]
    if isinstance(state, dict):
        for number in range(len(chain)):
            state.setdefault(number, {})  # a member without parameters here has saved nothing
    return [(state[number], leaf) for number, leaf in enumerate(chain)]


def _take_common(part: dict) -> dict:
    """Remove and return the common fields that ``part`` has."""
    taken = {f: part.pop(f) for f in COMMON if part.get(f) is not None}
    inner = part.get("optimizer")
    if isinstance(inner, dict) and "param_groups" in inner:
        taken["param_groups"] = inner.pop("param_groups")
        if not inner:
            del part["optimizer"]
    return taken


def _identities(groups: list[Group]) -> list[tuple]:
    """Return the keys that identify each group, independent of the layout and of the run's rates.

    Groups that differ only in their rates are numbered in the order of their rates.
    """
    keys = [k for k in param_group_identifier_keys if k not in OWN_OF_LAYOUT + OWN_OF_RUN]
    lasting = [tuple(group.get(key) for key in keys) for group in groups]
    rates = [tuple(group.get(key) or 0.0 for key in OWN_OF_RUN) for group in groups]
    places = sorted(range(len(groups)), key=lambda place: rates[place])
    numbers = {}
    for place in places:
        alike = [other for other in places if lasting[other] == lasting[place]]
        numbers[place] = alike.index(place)
    return [(*lasting[place], numbers[place]) for place in range(len(groups))]


def _distinct(chain: list[list[Group]]) -> list[Group]:
    """Return the settings of a chain's distinct groups, in an order that no layout changes."""
    merged: dict[tuple, Group] = {}
    for groups in chain:
        for identity, group in zip(_identities(groups), groups, strict=True):
            merged.setdefault(identity, group)
    return [
        {k: deepcopy(v) for k, v in merged[identity].items() if k not in OWN_OF_LAYOUT}
        for identity in sorted(merged, key=repr)
    ]


def _restored(
    name: str, saved: list[Group], current: list[Group], takes_rates: bool
) -> list[Group]:
    """Return the current groups with the saved settings, except for those of the run."""
    kept = (*OWN_OF_LAYOUT, *OF_ADAM, *(() if takes_rates else OWN_OF_RUN))
    end = None if takes_rates else -1  # the last part of an identity is the place by rates
    known = {
        identity[:end]: group for identity, group in zip(_identities(saved), saved, strict=True)
    }
    own = [identity[:end] for identity in _identities(current)]
    if any(identity not in known for identity in own):
        raise ValueError(
            f"the optimizer state of {name} has {len(saved)} parameter groups, which are not "
            f"those of this run: other parts of the model are frozen, or have settings of their own"
        )
    return [
        deepcopy(known[identity]) | {key: group[key] for key in kept if key in group}
        for identity, group in zip(own, current, strict=True)
    ]


def _placeholder(field: str) -> str:
    return f"_mimo_{field}"
