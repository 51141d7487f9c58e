# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of a MimoModel, in which each module has its own process groups."""

from dataclasses import replace
from functools import partial

from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.grad_finalization import finalize_mimo_grads, no_grad_sync
from megatron.core.models.mimo.setup.module_groups import Modules, own_groups
from megatron.core.transformer.transformer_config import TransformerConfig


def prepare_for_training(
    stages: list[MimoModel],
    modules: Modules,
    ddp_config: DistributedDataParallelConfig,
) -> None:
    """Wrap each module in DDP, in place, and set what the schedules and the training loop read.

    Frozen modules are wrapped as well, so that names in checkpoints do not depend on what is
    frozen. The schedules read ``no_sync_func`` and ``finalize_model_grads_func`` from the model's
    config; the training loop reads the groups over which it reduces and saves from
    ``pg_collection``.

    With ``check_for_nan_in_grad``, gradients are checked as they are finalized, at the end of a
    step, and not by DDP, for whose check of each bucket the host waits. A forward step adds its
    losses to ``step_losses`` of its stage, to have them checked with the gradients.

    Args:
        stages: the bare model, one for each virtual stage; the first holds the modalities.
    """
    finalize = partial(finalize_mimo_grads, are_checked=ddp_config.check_for_nan_in_grad)
    encoders = [name for name in modules if name != MIMO_LANGUAGE_MODULE_KEY]
    language = [stage.language_model for stage in stages if stage.language_model is not None]
    for number, stage in enumerate(stages):
        for name, module in stage.modality_submodules.items():
            config = next(iter(module.encoders.values())).config
            stage.modality_submodules[name] = _wrapped([module], config, ddp_config, 0)
        if stage.language_model is not None:
            stage.language_model = _wrapped(language, stage.config, ddp_config, number)
        stage.config.finalize_model_grads_func = finalize
        stage.step_losses = []
        stage.config.no_sync_func = partial(no_grad_sync, stages)
        stage.pg_collection = own_groups(modules)
        stage.rng_state_key_prefix = "language."
        if not stage.role.has_language_module:
            (name,) = stage.role.modality_module_names
            stage.rng_state_key_prefix = "encoder." if len(encoders) == 1 else f"{name}."


def _wrapped(
    parts: list[nn.Module],
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    vp_stage: int,
) -> DistributedDataParallel:
    """Wrap the part of a module that a virtual stage has; the optimizer wants one size of buckets
    for all parts."""
    # A copy, as DDP writes the bucket size into its config. The schedules do not start parameter
    # gathers for all stages at once (align_param_gather); each module's layers start the next one.
    ddp_config = replace(ddp_config, align_param_gather=False, check_for_nan_in_grad=False)
    if ddp_config.num_buckets is not None:
        trained = (p for part in parts for p in part.parameters() if p.requires_grad)
        count = sum(p.numel() for p in trained)
        ddp_config.bucket_size = count // ddp_config.num_buckets
    return DistributedDataParallel(
        config,
        ddp_config,
        parts[vp_stage],
        disable_bucketing=vp_stage > 0,
        pg_collection=parts[vp_stage].pg_collection,
    )
