# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Grids and process groups of the modules, from their layouts; no global ``parallel_state``."""

from __future__ import annotations

import torch

from examples.mimo.nemotron_vlm.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.model import IMAGES, ModuleGroups
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.bridge_topology import bridge_topology
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

DIMS = ["tp", "cp", "dp", "pp"]
"""Fastest first, as ``parallel_state`` orders ranks: what talks most lies closest together."""


def make_grid(layout: Layout, backend: str, rank_offset: int = 0) -> HyperCommGrid:
    """The grid of one module from ``rank_offset`` on; a view has the experts' factorization."""
    grid = HyperCommGrid([getattr(layout, dim) for dim in DIMS], DIMS, rank_offset, backend)
    grid.register_view(
        "expert",
        [layout.etp, layout.ep, layout.expt_dp, layout.pp],
        ["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    return grid


def make_modules(layouts: Layouts, backend: str) -> dict[str, ModuleGroups]:
    """Make every process group of the run, in the same order on every rank."""
    modules = {}
    for name, layout, first in (
        (IMAGES, layouts.encoder, 0),
        (LANGUAGE, layouts.language, layouts.language_offset),
    ):
        grid = make_grid(layout, backend, first)
        modules[name] = ModuleGroups(grid, ProcessGroupCollection.from_hyper_comm_grid(grid))
    return modules


def encoder_part(modules: dict[str, ModuleGroups]) -> int | None:
    """Which of the encoder's dp equal parts of a batch this rank encodes; None if it does not.

    Colocated, the bridge decides; non-colocated, it is the encoder's DP rank.
    """
    encoder, language = modules[IMAGES], modules[LANGUAGE]
    if encoder.groups is None or language.groups is None:
        return encoder.groups and encoder.groups.dp.rank()
    return bridge_topology(encoder.grid, language.grid).parts[encoder.groups.dp.rank()]


def prepare_megatron(modules: dict[str, ModuleGroups], seed: int) -> None:
    """Set up what Megatron keeps per process: scratch buffer, MoE metrics and the RNG tracker."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    destroy_moe_metrics_tracker()  # of a model before, which may have had fewer layers
    groups = modules[LANGUAGE].groups or modules[IMAGES].groups
    model_parallel_cuda_manual_seed(
        seed,
        tp_rank=groups.tp.rank(),
        ep_rank=groups.ep.rank(),
        etp_rank=groups.expt_tp.rank(),
        force_reset_rng=True,
    )
    torch.manual_seed(seed)
