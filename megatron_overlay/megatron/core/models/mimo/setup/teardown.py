# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Free a MimoModel and its process groups, so that another can be built in the same process."""

import gc

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.mimo.bridge.encoders_to_language import destroy_bridges
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.module_groups import Modules
from megatron.core.transformer.cuda_graphs import CudaGraphManager, delete_cuda_graphs
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker


def destroy(stages: list[MimoModel], modules: Modules) -> None:
    """Free every process group of the model; the default group stays.

    Collective over all ranks, so that none closes a group that another still uses. Some references
    would keep the groups alive, and are dropped here: the experts' dispatchers keep the last
    forward's autograd graph where the garbage collector does not see it, the cache of rotary
    embeddings keeps entries, and ``grad_scale_func``, which the training loop puts into the config,
    keeps the optimizer with its views of parameters. The model itself is a cycle of references,
    which the collector frees.

    Args:
        stages: the model's virtual stages, maybe none; the caller drops its own references first.
        modules: the modules, whose grids own the groups.
    """
    dist.barrier()
    _delete_graphs(stages)
    while stages:
        stage = stages.pop()
        stage.destroy()
        for module in stage.modules():
            if hasattr(module, "token_dispatcher"):
                module.token_dispatcher = None
        stage.config.grad_scale_func = None
        del stage
    RotaryEmbedding.forward.cache_clear()
    for module in modules.values():
        module.grid.destroy()
    destroy_bridges()
    parallel_state.destroy_global_memory_buffer()
    destroy_moe_metrics_tracker()
    gc.collect()


def _delete_graphs(stages: list[MimoModel]) -> None:
    """Delete the CUDA graphs: NCCL does not close a communicator that a graph has captured."""
    modules = [module for stage in stages for module in stage.modules()]
    managers = [module for module in modules if isinstance(module, CudaGraphManager)]
    for manager in managers:
        for runner in manager.cudagraph_runners:
            runner.fwd_graph = runner.bwd_graph = None
    if managers:
        delete_cuda_graphs()
