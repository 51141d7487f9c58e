# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The pipeline communicator of non-colocated modules.

The pipelines of an encoder and of the language model form one pipeline; a bridge connects the
encoder's last stage to the language model's first.
"""

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
    """Make the communicator of non-colocated modules; collective over the world.

    Encoders send ``[rows, H]``, the language model's stages ``[S, B, H]``.

    Args:
        config: the language model's configuration, with ``variable_seq_lengths``, as the shapes
            that stages send differ.
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
    """Free the process groups of all communicators, unless freed with the default group already."""
    for cache in (BridgeCommunicator._broadcast_pg_cache, BridgeCommunicator._bridge_pg_cache):
        for group in cache.values():
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        cache.clear()
