# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Let go of a model's process groups, so that their threads end."""

from __future__ import annotations

import gc

import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


def free_groups(model: torch.nn.Module) -> None:
    """End what keeps destroyed groups alive, with three threads each under gloo.

    The dispatchers keep the last forward's graph, whose nodes hold DDP's hooks where Python's
    collector does not see them; the cache of rotary embeddings keeps their CP group; and a model is
    a cycle. After a dozen models on 8 ranks the threads' switching costs more than the tests.
    """
    for module in model.modules():
        if hasattr(module, "token_dispatcher"):
            module.token_dispatcher = None
    RotaryEmbedding.forward.cache_clear()
    gc.collect()
