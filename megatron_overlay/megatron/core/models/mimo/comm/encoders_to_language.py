# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The pipeline communicator of non-colocated modules.

The stages of an encoder's pipeline and of the language model's form one pipeline; a bridge is
between the last of the one and the first of the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig


def encoders_to_language(
    grids: Mapping[str, HyperCommGrid], config: TransformerConfig
) -> MultiModulePipelineCommunicator:
    """The communicator of non-colocated modules; collective over the world.

    Encoders hand over ``[rows, H]``, the language model's stages ``[S, B, H]``.

    Args:
        grids: of all modules.
        config: the language model's, with ``variable_seq_lengths``: stages exchange tensors of
            their own shapes.
    """
    encoders = [name for name in grids if name != MIMO_LANGUAGE_MODULE_KEY]
    return MultiModulePipelineCommunicator(
        dict(grids),
        {name: [MIMO_LANGUAGE_MODULE_KEY] for name in encoders} | {MIMO_LANGUAGE_MODULE_KEY: []},
        config,
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
