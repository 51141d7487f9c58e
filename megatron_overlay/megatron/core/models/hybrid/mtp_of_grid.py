# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (MTP) of a hybrid model whose groups come from a grid.

Upstream reads the pipeline stage and the group of the log from the global ``parallel_state``, and
weighs a rank's loss by that rank's own counts of tokens. Where the global state exists, all is
upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel


def is_on_stage(post_process: bool, **of_global_stage) -> bool:
    """Return whether a model with MTP layers has them on this stage: on the last one.

    Args:
        post_process: whether the stage is the model's last.
        of_global_stage: what upstream's function takes.
    """
    if parallel_state.is_initialized():
        return mtp_on_this_rank(**of_global_stage)
    return post_process


def loss_group(model: HybridModel) -> dist.ProcessGroup | None:
    """Return the DP and CP ranks that share the MTP loss; None: upstream's global group.

    With a group, the loss is a sum over tokens like the model's own, whose global token count
    divides the gradients of both. Upstream's scale would be that of a rank and a microbatch.
    """
    return None if parallel_state.is_initialized() else model.pg_collection.dp_cp


def embedding(model: HybridModel) -> Callable[..., Tensor]:
    """Return the embedding of later tokens, cut over TP ranks as the hidden states are.

    A language model within another model leaves that cut of its own input to the outer one.
    """
    if not model.config.sequence_parallel or model.embedding.scatter_to_sequence_parallel:
        return model.embedding

    def embed(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        tokens = model.embedding(input_ids=input_ids, position_ids=position_ids)
        return scatter_to_sequence_parallel_region(tokens, group=model.pg_collection.tp)

    return embed
