# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Grids and process groups of a MIMO model's modules; no global ``parallel_state``."""

import random
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

DIMS = ["tp", "cp", "dp", "pp"]
"""Dims of a grid, fastest first, in the order of ``parallel_state``: TP ranks lie closest."""


class AxisSizes(Protocol):
    """Sizes of one module's axes; ``etp · ep · expt_dp`` equals ``tp · cp · dp``."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    expt_dp: int


@dataclass(frozen=True)
class ModuleGroups:
    """One module's grid and the process groups made from it; no groups on ranks outside it."""

    grid: HyperCommGrid
    groups: ProcessGroupCollection | None


Modules = Mapping[str, ModuleGroups]
"""Groups by module name, in one order on all ranks; the language model has the key
MIMO_LANGUAGE_MODULE_KEY."""


def make_grid(layout: AxisSizes, backend: str, rank_offset: int = 0) -> HyperCommGrid:
    """Make the grid of one module from ``rank_offset`` on, with a view for its experts."""
    grid = HyperCommGrid([getattr(layout, dim) for dim in DIMS], DIMS, rank_offset, backend)
    grid.register_view(
        "expert",
        [layout.etp, layout.ep, layout.expt_dp, layout.pp],
        ["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    return grid


def make_modules(
    layouts: Mapping[str, tuple[AxisSizes, int]], backend: str, optimizer_instances: int = 1
) -> dict[str, ModuleGroups]:
    """Make every process group of the modules; collective over the world.

    Args:
        layouts: sizes and first rank of each module, in the same order on every rank.
    """
    modules = {}
    for name, (layout, first) in layouts.items():
        grid = make_grid(layout, backend, first)
        groups = ProcessGroupCollection.from_hyper_comm_grid(grid, optimizer_instances)
        modules[name] = ModuleGroups(grid, groups)
    return modules


def schedule_collection(modules: Modules) -> MultiModuleProcessGroupCollection:
    """Return the groups of the modules that this rank holds, for ``pretrain`` and the schedules.

    A collection of several modules means that they are colocated.
    """
    held = {name: module.groups for name, module in modules.items() if module.groups is not None}
    language = MIMO_LANGUAGE_MODULE_KEY if MIMO_LANGUAGE_MODULE_KEY in held else None
    return MultiModuleProcessGroupCollection(held, language)


def own_groups(modules: Modules) -> ProcessGroupCollection:
    """Return the language model's groups, or those of the only module on a rank without it."""
    collection = schedule_collection(modules)
    if collection.has_language_model():
        return collection.get_language_model_collection()
    return next(iter(collection.module_pgs.values()))


def encoder_part(modules: Modules, name: str) -> int | None:
    """Return which of the encoder's dp equal parts of a batch this rank encodes.

    The bridge of colocated modules assigns the parts; without one it is the encoder's DP rank.
    None on a rank without the encoder.
    """
    encoder, language = modules[name], modules[MIMO_LANGUAGE_MODULE_KEY]
    if encoder.groups is None or language.groups is None:
        return encoder.groups and encoder.groups.dp.rank()
    return bridge_topology(encoder.grid, language.grid).parts[encoder.groups.dp.rank()]


def limit_waiting(timeout: timedelta) -> None:
    """Set the timeout of all of this rank's groups: those of a grid have PyTorch's default."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def stages_of(hooks: list[Callable], limit: timedelta) -> list[MegatronModule]:
    """List that gets a model's virtual stages once Megatron has built them; empty before.

    Args:
        hooks: ``post_wrap_hooks`` of the model's configuration; one is appended.
        limit: timeout of all groups, including those of the bridge, which the model makes.
    """
    stages: list[MegatronModule] = []

    def built(made: list[MegatronModule]) -> list[MegatronModule]:
        limit_waiting(limit)
        stages.extend(made)
        return made

    hooks.append(built)
    return stages


def prepare_process(modules: Modules, args: Namespace) -> None:
    """Seed all random generators, and set up Megatron's state per process.

    That state is a scratch buffer, MoE metrics and the RNG tracker.

    Args:
        args: Megatron's arguments: ``seed``, from which every pipeline stage derives its own (so
            the numbers drawn depend on the layout, as Megatron's do), and the choice of tracker.
    """
    groups = own_groups(modules)
    seed = args.seed + 100 * groups.pp.rank()  # as in Megatron
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    destroy_moe_metrics_tracker()  # those of an earlier model may have fewer layers
    model_parallel_cuda_manual_seed(
        seed,
        te_rng_tracker=args.te_rng_tracker,
        inference_rng_tracker=args.inference_rng_tracker,
        use_cudagraphable_rng=args.cuda_graph_impl != "none",
        tp_rank=groups.tp.rank(),
        ep_rank=groups.ep.rank(),
        etp_rank=groups.expt_tp.rank(),
        force_reset_rng=True,
    )
