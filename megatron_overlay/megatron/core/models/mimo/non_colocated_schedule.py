# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train a non-colocated MimoModel: each module has ranks that no other module has.

The stages of an encoder's pipeline and of the language model's form one pipeline (1F1B); a bridge
is between the last of the one and the first of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.grad_finalization import (
    ddp_modules,
    global_token_count,
    reduce_module_grads,
)
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.utils import get_model_config


def encoders_to_language(model: MimoModel) -> MultiModulePipelineCommunicator:
    """The communicator of a non-colocated model; collective over the world.

    Encoders hand over ``[rows, H]``, the language model's stages ``[S, B, H]``.

    Args:
        model: its config has ``variable_seq_lengths``, as stages exchange tensors of their own
            shapes.
    """
    grids = model.mimo_config.module_to_grid_map
    encoders = [name for name in grids if name != MIMO_LANGUAGE_MODULE_KEY]
    return MultiModulePipelineCommunicator(
        grids,
        {name: [MIMO_LANGUAGE_MODULE_KEY] for name in encoders} | {MIMO_LANGUAGE_MODULE_KEY: []},
        get_model_config(model),
        dim_mapping={"s": 0, "b": 1, "h": 2},
        module_output_ndim=dict.fromkeys(encoders, 2),
    )


def destroy_bridges() -> None:
    """Free the process groups of all communicators, those that are not gone with the world's."""
    for cache in (BridgeCommunicator._broadcast_pg_cache, BridgeCommunicator._bridge_pg_cache):
        for group in cache.values():
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        cache.clear()


def own_groups(
    groups: dict[str, ProcessGroupCollection | None],
) -> MultiModuleProcessGroupCollection:
    """What the schedule takes: the collections of the modules that this rank holds."""
    held = {name: collection for name, collection in groups.items() if collection is not None}
    language = MIMO_LANGUAGE_MODULE_KEY if MIMO_LANGUAGE_MODULE_KEY in held else None
    return MultiModuleProcessGroupCollection(held, language)


def non_colocated_forward_backward(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator,
    model: list[MimoModel],
    communicator: MultiModulePipelineCommunicator,
    groups: dict[str, ProcessGroupCollection | None],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list:
    """Forward and backward over one batch; gradients are final on return.

    Args:
        forward_step_func, num_microbatches, seq_length, micro_batch_size, forward_only: as in
            Megatron's schedules.
        data_iterator: of MimoModel's keyword arguments, of the samples that this rank's module
            takes of each microbatch: an encoder's rank needs their ``input_ids`` as well, which
            say how many rows belong to a sample.
        model: one MimoModel.
        communicator: of :func:`encoders_to_language`.
        groups: of all modules; None for those on other ranks.

    Returns:
        What the loss function reported of each microbatch on the language model's last stage;
        elsewhere empty.
    """
    with torch.set_grad_enabled(not forward_only):  # the bridge remembers rows for the backward
        return forward_backward_pipelining_without_interleaving(
            forward_step_func=_taking_gradients(forward_step_func),
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=own_groups(groups),
        )


def _taking_gradients(forward_step: Callable) -> Callable:
    """The forward step, whose encoder rows take a gradient also where the encoder is frozen.

    The pipeline brings one for every microbatch; at a frozen encoder it ends.
    """

    def step(*args):
        output, *rest = forward_step(*args)
        if torch.is_grad_enabled() and isinstance(output, dict):
            for rows in output.values():
                if not rows.requires_grad:
                    rows.requires_grad_()
        return output, *rest

    return step


def language_total(
    values: torch.Tensor, model: MimoModel, groups: MultiModuleProcessGroupCollection
) -> torch.Tensor:
    """Sum of what the language model's last stages counted, on every rank. Collective.

    Args:
        values: any shape; read on the last stages, on all their DP and CP ranks.
        model: for where the language model is.
        groups: this rank's.
    """
    total = torch.zeros_like(values)
    if groups.has_language_model():
        total = global_token_count(values, groups.get_language_model_collection())
    grid = model.mimo_config.module_to_grid_map[MIMO_LANGUAGE_MODULE_KEY]
    dist.broadcast(total, grid.rank_offset)
    return total


def finalize_non_colocated_grads(
    model: list[MimoModel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: MultiModuleProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """``finalize_mimo_grads`` for non-colocated modules: a ``finalize_model_grads_func``.

    Collective over all ranks. Encoders divide by the language model's token count as well.

    Args:
        model: the MimoModel.
        num_tokens: scalar, tokens with a loss on this rank; None leaves sums of token gradients.
        pg_collection: of this rank's modules.
        force_all_reduce: as in DDP's ``finish_grad_sync``.
    """
    reduce_module_grads(model, force_all_reduce)
    if num_tokens is not None:
        on_device = num_tokens.to(torch.cuda.current_device())
        total = language_total(on_device, model[0], pg_collection)
        for (stage,) in ddp_modules(model):
            stage.scale_gradients(1.0 / total.clamp(min=1))
