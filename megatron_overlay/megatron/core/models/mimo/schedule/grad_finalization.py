# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Finalize the gradients of all modules of a MimoModel, scaled by one token count."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY, ModuleLayout
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model

AT_A_TIME = 2**26
"""Elements of bf16 gradients that have a copy in fp32 at a time: 256 MiB."""


def _held_modules(model: Sequence[MimoModel]) -> list[list[DistributedDataParallel]]:
    """DDP-wrapped stages of each module on this rank, perhaps none; the language model comes last.

    Args:
        model: one MimoModel for each virtual stage; the first holds the modalities.
    """
    modalities = [[module] for stage in model for module in stage.modality_submodules.values()]
    held = [*modalities, [stage.language_model for stage in model]]
    return [[s for s in stages if isinstance(s, DistributedDataParallel)] for stages in held]


@contextlib.contextmanager
def no_grad_sync(model: Sequence[MimoModel]) -> Iterator[None]:
    """Inside, every module's gradient reduction is held back; the schedule's ``no_sync_func``."""
    *_, language = _held_modules(model)
    with no_encoder_grad_sync(model), contextlib.ExitStack() as stack:
        for module in language:
            stack.enter_context(module.no_sync())
        yield


@contextlib.contextmanager
def no_encoder_grad_sync(model: Sequence[MimoModel]) -> Iterator[None]:
    """Inside, the encoders' gradient reductions are held back.

    After the block, an encoder's reductions may start during its backward only if the encoder
    declares that it ``runs_on_every_rank``. Any other encoder has no backward on a rank without
    images, and would start its reductions in another order there than on its siblings; its
    reductions start when its gradients are finalized. So do those of an encoder that is recomputed
    in several parts, as DDP does not know which part is the last.
    """
    recomputed = model[0].mimo_config.encoder_schedule.recompute
    *encoders, _ = _held_modules(model)
    with contextlib.ExitStack() as stack:
        for module in itertools.chain(*encoders):
            if getattr(unwrap_model(module), "runs_on_every_rank", False) and not recomputed:
                stack.enter_context(module.no_sync())
            else:
                for group in module.bucket_groups + module.expert_parallel_bucket_groups:
                    group.is_last_microbatch = False
        yield


def language_total(
    values: torch.Tensor, model: MimoModel, groups: ProcessGroupCollection | None
) -> torch.Tensor:
    """Sum ``values`` over the language model's last-stage ranks, on every rank. Collective.

    Args:
        values: any shape; read on all DP and CP ranks of the last stage.
        groups: the language model's groups; None on ranks without it.
    """
    total = torch.zeros_like(values) if groups is None else values.clone()
    if groups is not None:
        if groups.pp.size() > 1:
            dist.broadcast(total, dist.get_process_group_ranks(groups.pp)[-1], groups.pp)
        dist.all_reduce(total, group=groups.dp_cp)
    if model.role.mode is ModuleLayout.NON_COLOCATED:
        grid = model.mimo_config.module_to_grid_map[MIMO_LANGUAGE_MODULE_KEY]
        dist.broadcast(total, grid.rank_offset)
    return total


def finalize_mimo_grads(
    model: list[MimoModel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | MultiModuleProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    are_checked: bool = False,
) -> None:
    """Reduce each module's gradients over its own groups, then divide all by one token count.

    A drop-in ``finalize_model_grads_func``. Upstream's would sum the token count over an encoder's
    own DP ranks, which is not the number of tokens that the loss was summed over. A `MimoOptimizer`
    of the model then launches what its step reads of the gradients, before the host waits for them.
    Collective over all ranks of the model.

    Args:
        num_tokens: scalar, tokens with a loss on this rank; None skips the division.
        pg_collection: groups of the language model, or of all this rank's modules.
        are_checked: whether to check the step's losses and gradients, as `check_step` does.
    """
    reduce_module_grads(model, force_all_reduce)
    if num_tokens is not None:
        on_device = num_tokens.to(torch.cuda.current_device())
        total = language_total(on_device, model[0], _language_groups(pg_collection))
        for stage in itertools.chain(*_held_modules(model)):
            _scale_gradients(stage, 1.0 / total.clamp(min=1))
    optimizer = getattr(model[0], "optimizer", lambda: None)()
    if optimizer is not None:
        optimizer.launch()
    if are_checked:
        check_step(model)


def _scale_gradients(stage: DistributedDataParallel, factor: torch.Tensor) -> None:
    """Multiply gradients by a number that is on the device, fp32 scalar.

    DDP's method takes PyTorch's product with such a number, which reaches a quarter of the memory's
    speed and rounds the number to the gradients' type first. The kernel of gradient scalers does
    neither, but takes no bf16 on GPUs; there, products of some elements at a time are in fp32.
    """
    found_inf = torch.zeros((), device=factor.device)  # of no use here
    for buffer in stage.buffers + stage.expert_parallel_buffers:
        for gradients in (buffer.grad_data, *buffer.extra_main_grads):
            if gradients.dtype == torch.bfloat16:
                for part in gradients.split(AT_A_TIME):
                    part.copy_(part.float().mul_(factor))
            else:
                torch._amp_foreach_non_finite_check_and_unscale_([gradients], found_inf, factor)


def check_step(model: list[MimoModel]) -> None:
    """Check that this rank's losses and gradients of a step are finite. The host waits for both
    once, after all work of the step has been launched.

    Raises:
        RuntimeError: they are not. With reruns, Megatron's state machine repeats the step instead,
            and then ends the run.
    """
    losses = [loss for stage in model for loss in stage.step_losses]
    for stage in model:
        stage.step_losses.clear()
    held = itertools.chain(*_held_modules(model))
    buffers = [each for module in held for each in module.buffers + module.expert_parallel_buffers]
    found = {"loss": losses, "gradient": [buffer.grad_data.norm().float() for buffer in buffers]}
    for what, values in found.items():
        if values:
            get_rerun_state_machine().validate_result(
                torch.stack(values).norm(),
                lambda norm: not norm.isfinite(),
                f"a {what} of this rank is NaN or Inf",
                tolerance=0.001,  # the backward of attention need not repeat its last bits
            )


def _language_groups(
    collection: ProcessGroupCollection | MultiModuleProcessGroupCollection,
) -> ProcessGroupCollection | None:
    if not isinstance(collection, MultiModuleProcessGroupCollection):
        return collection
    return collection.get_language_model_collection() if collection.has_language_model() else None


def reduce_module_grads(model: list[MimoModel], force_all_reduce: bool = False) -> None:
    """Reduce the gradients of each module that this rank holds over the module's own groups.

    Where the loss is a mean of the ranks' means, the gradients are rescaled to a mean over the
    language model's DP and CP ranks, which have the loss; DDP divides by the module's own number.
    """
    grids = model[0].mimo_config.module_to_grid_map
    for stages in filter(None, _held_modules(model)):
        finalize_model_grads(
            stages,
            None,
            pg_collection=unwrap_model(stages[0]).pg_collection,
            force_all_reduce=force_all_reduce,
        )
        if not stages[0].config.calculate_per_token_loss:
            grid = grids[MIMO_LANGUAGE_MODULE_KEY]
            sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
            with_loss = sizes["dp"] * sizes.get("cp", 1)
            for stage in stages:
                stage.scale_gradients(stage.dp_cp_group.size() / with_loss)
