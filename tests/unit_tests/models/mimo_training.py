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

from examples.mimo.nemotron_vlm.arguments import Options
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.mock import MockStrips
from examples.mimo.nemotron_vlm.data_provider import Loading, received, to_device
from examples.mimo.nemotron_vlm.initialization import initialize_weights
from examples.mimo.nemotron_vlm.model import IMAGES, placed
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.mimo.comm.encoders_to_language import encoders_to_language
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.config.role import ModuleLayout
from megatron.core.models.mimo.data_parallel import prepare_for_training
from megatron.core.models.mimo.encoding import run_microbatch
from megatron.core.models.mimo.grad_finalization import language_total
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.module_groups import (
    ModuleGroups,
    make_grid,
    make_modules,
    prepare_process,
    schedule_collection,
)
from megatron.core.models.mimo.teardown import destroy
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from tests.unit_tests.models.group_threads import free_groups
from tests.unit_tests.models.mimo_models import Build, one_rank
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

BACKEND = "nccl" if HAVE_CUDA else "gloo"
SEED = 0

ADAM = OptimizerConfig(
    optimizer="adam", lr=1e-3, adam_eps=1e-3, clip_grad=1.0, use_distributed_optimizer=True
)
"""The epsilon is of the gradients' size: with a small one Adam makes full steps of rounding."""

DDP = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)


@contextlib.contextmanager
def modules_of(options: Options) -> Iterator[dict[str, ModuleGroups]]:
    """Groups of both modules over the world; they end with the block."""
    layouts = options.layouts
    modules = make_modules(
        placed(layouts),
        BACKEND,
    )
    try:
        yield modules
    finally:
        destroy([], modules)


@contextlib.contextmanager
def modules_of_one_rank() -> Iterator[dict[str, ModuleGroups]]:
    """Both modules on a grid of this rank alone: the one-rank run, on each rank.

    All ranks make it, because the optimizer and its norm speak to the world.
    """
    layout = one_rank().layouts.language
    grids = [make_grid(layout, BACKEND, rank) for rank in range(Utils.world_size)]
    collections = [ProcessGroupCollection.from_hyper_comm_grid(grid) for grid in grids]
    own = ModuleGroups(grids[Utils.rank], collections[Utils.rank])
    try:
        yield {IMAGES: own, LANGUAGE: own}
    finally:
        destroy([], {str(rank): ModuleGroups(grid, None) for rank, grid in enumerate(grids)})


def microbatches(
    options: Options,
    modules: dict[str, ModuleGroups],
    step: int,
    source: SampleSource | None = None,
) -> list[dict]:
    """This rank's microbatches of one step of random data, as MimoModel's arguments."""
    args, preset = options.args, options.preset
    size = preset.encoder
    source = source or MockStrips(size.tile, size.tokens_per_tile, args.seq_length, SEED)
    loading = Loading(args, options.layouts, preset, modules, source)
    count = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    first = step * args.global_batch_size
    takes = loading.plan.takes(loading.rows("train"), first, count, args.micro_batch_size)
    batches = [to_device(received(loading.reader[take])) for take in takes]
    return [{k: v for k, v in batch.items() if not k.startswith("sample")} for batch in batches]


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
    build: Build, options: Options, modules: dict[str, ModuleGroups]
) -> Iterator[MimoModel]:
    """The model with its initial weights; what Megatron keeps per process ends with the modules."""
    prepare_process(modules, SEED)
    torch.manual_seed(SEED)
    model = build(options, modules).to(Utils.device)
    initialize_weights(model, SEED)
    try:
        yield model
    finally:
        model.destroy()
        free_groups(model)


def train(
    build: Build,
    options: Options,
    modules: dict[str, ModuleGroups],
    steps: int,
    source: SampleSource | None = None,
) -> Run:
    """Train with Adam, over the groups of ``modules``, on random data or those of ``source``."""
    collection = schedule_collection(modules)
    with initialized(build, options, modules) as model:
        prepare_for_training([model], modules, DDP)
        optimizer = get_megatron_optimizer(ADAM, [model])
        communicator = None
        if model.role.mode is ModuleLayout.NON_COLOCATED:
            grids = {name: module.grid for name, module in modules.items()}
            communicator = encoders_to_language(grids, get_model_config(model))
        schedule = partial(
            get_forward_backward_func(schedule_pg_collection=collection),
            forward_step_func=_forward_step,
            model=[model],
            seq_length=options.args.seq_length,
            micro_batch_size=options.args.micro_batch_size,
            forward_only=False,
            p2p_communicator=communicator,
            pg_collection=collection,
        )
        run = Run()
        groups = modules[LANGUAGE].groups
        for step in range(steps):
            batches = microbatches(options, modules, step, source)
            model.zero_grad_buffer()
            optimizer.zero_grad()
            reports = schedule(data_iterator=iter(batches), num_microbatches=len(batches))
            stepped, grad_norm, _ = optimizer.step()
            assert stepped
            local = sum(reports, torch.zeros(2, dtype=torch.float64, device=Utils.device))
            loss, tokens = language_total(local, model, groups).tolist()
            run.losses.append(loss / tokens)
            run.grad_norms.append(grad_norm)
            if groups is not None:
                run.experts = run.experts or experts(model, groups)
        del optimizer, schedule, communicator
    return run


def _forward_step(batches: Iterator[dict], model: MimoModel):
    output, loss_mask = run_microbatch(model, next(batches))
    return output, partial(_summed_loss, loss_mask=loss_mask)


def _summed_loss(losses: torch.Tensor, loss_mask: torch.Tensor):
    total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, tokens.to(torch.int), torch.stack([total.detach().double(), tokens.double()])


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
