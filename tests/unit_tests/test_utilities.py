# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Shared by tests that run under torchrun: process groups, world sizes, and a guard.

Importing this module on a machine without CUDA installs the CPU runtime, if the tree has it.
"""

import contextlib
import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state

HAVE_CUDA = torch.cuda.is_available()
_CPU_RUNTIME = "megatron.core.cpu_runtime"
if not HAVE_CUDA and importlib.util.find_spec(_CPU_RUNTIME):
    importlib.import_module(_CPU_RUNTIME).install()

COLLECTIVE_TIMEOUT = timedelta(seconds=300 if HAVE_CUDA else 50)
"""A collective that takes longer fails. On GPUs a rank may first try out Triton kernels."""


class Utils:
    """The ranks of this run, named as upstream's `tests.unit_tests.test_utilities.Utils`."""

    world_size: int
    rank: int
    device = torch.device("cpu")
    if HAVE_CUDA:  # ranks share the GPUs of a host that has fewer
        _local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", _local_rank % torch.cuda.device_count())
    _initialisations = _turns = 0

    @staticmethod
    def read_environment() -> None:
        """Learn which rank of how many this process is; to be called again after a fork."""
        Utils.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        Utils.rank = int(os.environ.get("RANK", "0"))

    @staticmethod
    @contextlib.contextmanager
    def first_rank_first() -> Iterator[bool]:
        """Yield whether this is the first rank; the others leave the block when it has left.

        There are no process groups then. Ranks wait longer than for a collective, because the first
        rank may have much to make on a busy machine.
        """
        Utils.destroy()
        Utils._turns += 1
        key, store = f"first-rank-{Utils._turns}", Utils.store()
        try:
            yield Utils.rank == 0
        finally:
            if Utils.rank == 0:
                store.set(key, "left")
        store.wait([key], timedelta(minutes=5))

    @staticmethod
    @contextlib.contextmanager
    def shared_directory() -> Iterator[Path]:
        """A temporary directory that all ranks know of."""
        Utils.initialize_distributed()
        with tempfile.TemporaryDirectory() as own:
            chosen = [own]
            dist.broadcast_object_list(chosen)
            yield Path(chosen[0])

    @staticmethod
    def initialize_distributed() -> None:
        """Make the default group (gloo on CPU, else NCCL), unless there is one."""
        if dist.is_initialized():
            return
        # Groups made without a timeout take this module's default, not the default group's.
        dist.distributed_c10d.default_pg_timeout = COLLECTIVE_TIMEOUT
        if HAVE_CUDA:
            torch.cuda.set_device(Utils.device)
        # A new prefix each time: gloo would find the addresses of the groups before.
        Utils._initialisations += 1
        dist.init_process_group(
            backend="nccl" if HAVE_CUDA else "gloo",
            store=dist.PrefixStore(f"groups-{Utils._initialisations}", Utils.store()),
            world_size=Utils.world_size,
            rank=Utils.rank,
            timeout=COLLECTIVE_TIMEOUT,
        )

    @staticmethod
    @functools.cache
    def store() -> dist.Store:
        """The store that all ranks of this run share, which torchrun serves."""
        if "MASTER_ADDR" not in os.environ:
            return dist.HashStore()
        store, _, _ = next(dist.rendezvous("env://"))
        return store

    @staticmethod
    @contextlib.contextmanager
    def group_of_first_ranks(size: int) -> Iterator[dist.ProcessGroup | None]:
        """A group of the first `size` ranks; None on the others, which have no part in the test."""
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            yield None
            return
        yield group
        dist.destroy_process_group(group)

    @staticmethod
    def destroy() -> None:
        """Forget the global groups and end all process groups."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


Utils.read_environment()


def requires_world_size(size: int) -> pytest.MarkDecorator:
    """Mark a test for runs of exactly `size` ranks; on others, conftest.py skips it visibly."""
    return pytest.mark.world_size(size)


# Getters of virtual stages and of the memory buffer read no group. Layers read the groups of weight
# rematerialization (GTP), and take None for "unused".
_GROUP_GETTER = re.compile(
    r"get_(?!virtual_|.*gtp_weight_remat).*(group|groups|gloo|ranks?|world_size)"
)


def _refuse_global_group(*args, **kwargs):
    raise AssertionError("this reads a global group of parallel_state; pass the group explicitly")


@contextlib.contextmanager
def no_global_parallel_state() -> Iterator[None]:
    """Inside, any read of a global group, or of a rank or size of one, raises AssertionError.

    The getters' code is exchanged, not the attributes of a module: names that other modules have
    imported refuse as well.
    """
    originals = {
        getter: getter.__code__
        for name, getter in vars(parallel_state).items()
        if _GROUP_GETTER.fullmatch(name)
        and getattr(getter, "__module__", "") == parallel_state.__name__
    }
    for getter in originals:
        getter.__code__ = _refuse_global_group.__code__.replace(co_name=getter.__name__)
    try:
        yield
    finally:
        for getter, code in originals.items():
            getter.__code__ = code
