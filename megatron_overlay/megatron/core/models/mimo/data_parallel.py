# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of a MimoModel: each module over its own groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo.grad_finalization import finalize_mimo_grads, no_grad_sync
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.module_groups import Modules, own_groups
from megatron.core.transformer.transformer_config import TransformerConfig


def prepare_for_training(
    stages: list[MimoModel],
    modules: Modules,
    ddp_config: DistributedDataParallelConfig,
    recompute_encoder_shares: int | None = None,
    encoder_macro_batch: int = 1,
) -> None:
    """Wrap each module in DDP, in place, and give the schedules and the loop what they ask for.

    Frozen modules are wrapped as well, so that names in checkpoints do not depend on what is
    frozen. The schedules find how to hold back and to finish gradients in the model's config; the
    training loop finds the groups of what it reduces and saves in ``pg_collection``.

    Args:
        stages: the bare model, one for each virtual stage; the first holds the modalities.
        modules: groups of the model's modules.
        ddp_config: of all modules.
        recompute_encoder_shares: keep no encoder activations; in the backward run the encoders
            again, this many microbatches' worth at a time. ``None`` keeps all.
        encoder_macro_batch: microbatches that are encoded at once where the language model has no
            pipeline, or in its bubbles; in three phases, all of a step are.
    """
    for number, stage in enumerate(stages):
        for name, module in stage.modality_submodules.items():
            config = next(iter(module.encoders.values())).config
            stage.modality_submodules[name] = _wrapped(module, config, ddp_config, number)
        if stage.language_model is not None:
            stage.language_model = _wrapped(stage.language_model, stage.config, ddp_config, number)
        stage.config.finalize_model_grads_func = finalize_mimo_grads
        stage.config.no_sync_func = partial(no_grad_sync, stages)
        stage.recompute_encoder_shares = recompute_encoder_shares
        stage.encoder_macro_batch = encoder_macro_batch
        stage.pg_collection = own_groups(modules)
        stage.rng_state_key_prefix = "language." if stage.role.has_language_module else "encoder."


def _wrapped(
    module: nn.Module,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    vp_stage: int,
) -> DistributedDataParallel:
    # A copy: DDP writes the size of a bucket into it. The schedules start no parameter gathers for
    # all stages at once, so that each module's layers start the next one themselves.
    ddp_config = replace(ddp_config, align_param_gather=False)
    if ddp_config.num_buckets is not None:
        count = sum(p.numel() for p in module.parameters() if p.requires_grad)
        ddp_config.bucket_size = count // ddp_config.num_buckets
    return DistributedDataParallel(
        config,
        ddp_config,
        module,
        disable_bucketing=vp_stage > 0,
        pg_collection=module.pg_collection,
    )
