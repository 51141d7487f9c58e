# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Process groups: gloo in place of NCCL, without device arguments, plus features gloo lacks."""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.cpu_runtime.replacement import Replacement, refusal


def gloo_for(backend: Any) -> Any:
    """Return `"gloo"` for any backend string with NCCL in it (also `"cpu:gloo,cuda:nccl"`)."""
    return "gloo" if backend is not None and "nccl" in str(backend).lower() else backend


@functools.cache
def _devices_of(process: int) -> list[dist.ProcessGroupGloo.Device]:
    """Return the gloo devices of a process; a fork has others, without the parent's threads.

    PyTorch reads the variable only where it makes the devices itself.
    """
    gloo, names = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in names.split(",")]


class _OneDevice(type(dist.ProcessGroupGloo)):
    """Metaclass by which all gloo groups of a process share one device and its thread.

    Otherwise each group has a thread of its own, which polls for work a hundred times a second.
    """

    def __call__(cls, store, rank, size, timeout):
        original = cls.__base__
        options = original._Options()
        options._devices = _devices_of(os.getpid())
        options._timeout = timeout
        return original(store, rank, size, options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__)


def _init_process_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return original(gloo_for(backend or "nccl"), *args, **kwargs)

    return init_process_group


def _new_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        if timeout is None:  # gloo's transfers keep the timeout of their group's creation
            timeout = _time_limit_of_world()
        # Options are specific to a backend: NCCL's mean nothing to gloo.
        group = original(ranks, timeout, gloo_for(backend), None, *args, **kwargs)
        # A member that left at once would close connections that others are still making.
        if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "gloo":
            distributed_c10d.barrier(group)
        return group

    return new_group


def _time_limit_of_world() -> timedelta | None:
    world = dist.group.WORLD
    if world is None or dist.get_backend(world) != "gloo":
        return None
    return world._get_backend(torch.device("cpu")).options._timeout


def _process_group_name(original: Callable) -> Callable:
    @functools.wraps(original)
    def process_group_name(ranks, use_hashed_name):
        # The name is a count, and prefixes the group's keys in the store. Gloo connects the ranks
        # of a group when it is made, NCCL when it is used. Two groups of different ranks, each made
        # by its own members only, have the same count and would read each other's addresses.
        name = original(ranks, use_hashed_name)
        return name if use_hashed_name or not ranks else f"{name}:{'-'.join(map(str, ranks))}"

    return process_group_name


def _barrier(original: Callable) -> Callable:
    @functools.wraps(original)
    def barrier(group=None, async_op=False, device_ids=None, **kwargs):
        return original(group, async_op, **kwargs)

    return barrier


def _all_to_all_single(original: Callable) -> Callable:
    def as_list(splits):
        return splits.tolist() if isinstance(splits, torch.Tensor) else splits

    @functools.wraps(original)
    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs
    ):
        # MoE dispatchers turn splits into host arrays only where they find them on a GPU.
        splits = as_list(output_split_sizes), as_list(input_split_sizes)
        return original(output, input, *splits, *args, **kwargs)

    return all_to_all_single


def _all_gather(original: Callable) -> Callable:
    @functools.wraps(original)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        # NCCL gathers parts that differ in their first dimension, gloo only equal ones.
        longest = max(part.shape[0] if part.dim() else 0 for part in tensor_list)
        if all(part.dim() == 0 or part.shape[0] == longest for part in tensor_list):
            return original(tensor_list, tensor, group, async_op)
        if async_op:
            raise refusal("torch.distributed.all_gather of unequal parts with async_op=True")
        padded = [part.new_empty(longest, *part.shape[1:]) for part in tensor_list]
        mine = padded[0].new_zeros(padded[0].shape)
        mine[: tensor.shape[0]] = tensor
        original(padded, mine, group)
        for part, longer in zip(tensor_list, padded, strict=True):
            part.copy_(longer[: part.shape[0]])

    return all_gather


def replacements() -> list[Replacement]:
    """Return the replacements in `torch.distributed` and in the module that defines its names."""
    wrappers = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "barrier": _barrier,
        "all_gather": _all_gather,
        "all_to_all_single": _all_to_all_single,
    }
    plan = []
    for name, wrap in wrappers.items():
        wrapped = wrap(getattr(distributed_c10d, name))
        plan += [Replacement(owner, name, wrapped) for owner in (dist, distributed_c10d)]
    name = "_process_group_name"
    gloo = distributed_c10d.ProcessGroupGloo
    return [
        *plan,
        Replacement(distributed_c10d, gloo.__name__, _OneDevice(gloo.__name__, (gloo,), {})),
        Replacement(distributed_c10d, name, _process_group_name(getattr(distributed_c10d, name))),
    ]
