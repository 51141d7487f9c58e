# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Training of tiny MimoModels, on the groups of a layout or of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.batches import BatchPlan
from examples.mimo.nemotron_vlm.data import SampleSource, make_source
from examples.mimo.nemotron_vlm.grids import (
    encoder_part,
    make_grid,
    make_modules,
    prepare_megatron,
)
from examples.mimo.nemotron_vlm.initialization import initialize_weights
from examples.mimo.nemotron_vlm.layout import Layouts
from examples.mimo.nemotron_vlm.loss import summed_loss
from examples.mimo.nemotron_vlm.model import (
    IMAGES,
    ModuleGroups,
)
from examples.mimo.nemotron_vlm.trainer import wrap_in_ddp
from megatron.core import parallel_state
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.config.role import ModuleLayout
from megatron.core.models.mimo.encoding import with_embeddings
from megatron.core.models.mimo.grad_finalization import global_token_count
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.non_colocated_schedule import (
    destroy_bridges,
    encoders_to_language,
    language_total,
    non_colocated_forward_backward,
    own_groups,
)
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.utils import unwrap_model
from tests.unit_tests.models.group_threads import free_groups
from tests.unit_tests.models.mimo_models import ONE_RANK, PRESET, Build
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

BACKEND = "nccl" if HAVE_CUDA else "gloo"
SEED = 0

ADAM = OptimizerConfig(
    optimizer="adam", lr=1e-3, adam_eps=1e-3, clip_grad=1.0, use_distributed_optimizer=True
)
"""The epsilon is of the gradients' size: with a small one Adam makes full steps of rounding."""


@contextlib.contextmanager
def modules_of(layouts: Layouts) -> Iterator[dict[str, ModuleGroups]]:
    """Groups of both modules over the world; they end with the block."""
    modules = make_modules(layouts, BACKEND)
    try:
        yield modules
    finally:
        for module in modules.values():
            module.grid.destroy()


@contextlib.contextmanager
def modules_of_one_rank() -> Iterator[dict[str, ModuleGroups]]:
    """Both modules on a grid of this rank alone: the one-rank run, on each rank.

    All ranks make it, because the optimizer and its norm speak to the world.
    """
    grids = [make_grid(ONE_RANK.language, BACKEND, rank) for rank in range(Utils.world_size)]
    collections = [ProcessGroupCollection.from_hyper_comm_grid(grid) for grid in grids]
    own = ModuleGroups(grids[Utils.rank], collections[Utils.rank])
    try:
        yield {IMAGES: own, LANGUAGE: own}
    finally:
        for grid in grids:
            grid.destroy()


def microbatches(
    layouts: Layouts,
    modules: dict[str, ModuleGroups],
    step: int,
    source: SampleSource | None = None,
) -> list[dict]:
    """This rank's microbatches of one step of random data, as MimoModel's arguments."""
    groups = modules[LANGUAGE].groups
    plan = BatchPlan(
        layouts,
        encoder_part=encoder_part(modules),
        language_dp=groups and groups.dp.rank(),
        tokens_per_tile=PRESET.encoder.tokens_per_tile,
    )
    source = source or make_source("mock", PRESET.encoder, layouts.batch.seq_length, SEED)
    return plan.microbatches(source, "train", step, Utils.device)


@dataclass
class Run:
    """What training did.

    Args:
        losses: per token, of each step.
        grad_norms: of each step.
        experts: this rank's experts after the first step, by their names on one rank.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    experts: dict[str, torch.Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def initialized(
    build: Build, layouts: Layouts, modules: dict[str, ModuleGroups]
) -> Iterator[MimoModel]:
    """The model with its initial weights; what Megatron keeps per process ends with the block."""
    prepare_megatron(modules, SEED)
    model = build(layouts, modules).to(Utils.device)
    initialize_weights(model, SEED)
    try:
        yield model
    finally:
        model.destroy()
        free_groups(model)
        parallel_state.destroy_global_memory_buffer()
        destroy_moe_metrics_tracker()


def train(
    build: Build,
    layouts: Layouts,
    modules: dict[str, ModuleGroups],
    steps: int,
    source: SampleSource | None = None,
) -> Run:
    """Train with Adam, over the groups of ``modules``, on random data or those of ``source``."""
    groups = modules[LANGUAGE].groups
    with initialized(build, layouts, modules) as model:
        wrap_in_ddp([model])
        optimizer = get_mimo_optimizer(model, ADAM)
        run = Run()
        with _schedule(model, layouts, modules) as schedule:
            for step in range(steps):
                batches = microbatches(layouts, modules, step, source)
                reports = _forward_backward(model, optimizer, layouts, schedule, batches)
                stepped, grad_norm, _ = optimizer.step()
                assert stepped
                loss, tokens = _total(reports, model, modules)
                run.losses.append(loss / tokens)
                run.grad_norms.append(grad_norm)
                if groups is not None:
                    run.experts = run.experts or experts(model, groups)
    return run


@contextlib.contextmanager
def _schedule(model: MimoModel, layouts: Layouts, modules: dict[str, ModuleGroups]):
    if not layouts.non_colocated:
        yield partial(forward_backward_no_pipelining, pg_collection=modules[LANGUAGE].groups)
        return
    try:
        yield partial(
            non_colocated_forward_backward,
            communicator=encoders_to_language(model),
            groups={name: module.groups for name, module in modules.items()},
        )
    finally:
        destroy_bridges()


def _forward_backward(model, optimizer, layouts, schedule, batches: list[dict]) -> list:
    held = (*model.modality_submodules.values(), model.language_model)
    for module in (module for module in held if module is not None):
        module.zero_grad_buffer()
    optimizer.zero_grad()
    return schedule(
        forward_step_func=_forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=layouts.num_microbatches,
        seq_length=layouts.batch.seq_length,
        micro_batch_size=layouts.batch.micro_size,
    )


def _total(reports: list[torch.Tensor], model, modules) -> list[float]:
    total = sum(reports, torch.zeros(2, dtype=torch.float64, device=Utils.device))
    groups = {name: module.groups for name, module in modules.items()}
    if model.role.mode is ModuleLayout.NON_COLOCATED:
        return language_total(total, model, own_groups(groups)).tolist()
    return global_token_count(total, groups[LANGUAGE]).tolist()


def _forward_step(batches: Iterator[dict], model: MimoModel):
    output, loss_mask = model(**with_embeddings(model, next(batches)))
    return output, partial(summed_loss, loss_mask=loss_mask)


def experts(model: MimoModel, groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """Copies of this rank's expert weights, by the names they have on one rank."""
    first = groups.ep.rank() * (model.config.num_moe_experts // groups.ep.size())
    weights = {}
    for name, parameter in unwrap_model(model.language_model).named_parameters():
        layer, marker, local = name.partition("local_experts.")
        if marker:
            index, _, rest = local.partition(".")
            weights[f"{layer}{marker}{first + int(index)}.{rest}"] = parameter.detach().clone()
    return weights


def expert_shard(
    whole: torch.Tensor, part: torch.Tensor, groups: ProcessGroupCollection
) -> torch.Tensor:
    """What this rank's expert-TP coordinate holds of ``whole``, split where ``part`` is smaller."""
    split = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
    if not split:
        return whole
    (dim,) = split
    return whole.chunk(groups.expt_tp.size(), dim)[groups.expt_tp.rank()]


def process_groups() -> int:
    """Process groups that this rank is in."""
    return len(dist.distributed_c10d._world.pg_map)
