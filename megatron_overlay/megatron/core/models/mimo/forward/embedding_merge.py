# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Merge text embeddings and modality rows into the language model's input, and their gradient."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.models.mimo.config.role import ModuleLayout
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model


def embed_tokens(
    model: MegatronModule,
    input_ids: Tensor,
    position_ids: Tensor | None,
    modality_embeddings: Mapping[str, Tensor],
) -> Tensor:
    """Return the embeddings ``[S, B, H]`` of a batch, with modality rows in place of their tokens.

    A bridge delivers exactly as many rows as a modality has tokens, so the host need not wait for
    their count. Without a bridge, upstream's methods count them.

    Args:
        input_ids, position_ids: ``[B, S]``.
        modality_embeddings: ``[rows, H]`` of each modality, in the order of its tokens.

    Raises:
        ValueError: without a bridge, a modality has more tokens than rows, or fewer.
    """
    special = model.special_token_ids
    if not model.colocated_comms:
        text = _text(model, model.get_text_embeddings, input_ids, position_ids, special)
        return model.align_embeddings_by_token_positions(
            {**modality_embeddings, "text": text}, input_ids, special
        )
    text_ids = input_ids
    for token_id in special.values():
        text_ids = text_ids.masked_fill(input_ids == token_id, 0)
    text = _text(model, unwrap_model(model.language_model).embedding, text_ids, position_ids)
    return place_rows(text, input_ids, modality_embeddings, special)


def _text(model: MegatronModule, embed: Callable[..., Tensor], *inputs: object) -> Tensor:
    """``embed(*inputs)`` with one dropout mask for all TP ranks of the language model.

    Each TP rank embeds all tokens and drops the other ranks' tokens only afterwards. Under sequence
    parallelism, upstream's embedding would draw a different mask on each rank, and the gradients of
    the other ranks' tokens would come back through a mask that their forward did not use. A model
    without grids (upstream's own) keeps upstream's masks.
    """
    adapter = model.partition_adapter
    has_grids = bool(model.mimo_config.module_to_grid_map)
    if not (has_grids and adapter is not None and adapter.cfg.seq_parallel):
        return embed(*inputs)
    dropout = unwrap_model(model.language_model).embedding.embedding_dropout
    training = dropout.training
    dropout.eval()
    text = embed(*inputs)
    return dropout.train(training)(text)


def place_rows(
    text: Tensor,
    input_ids: Tensor,
    modality_embeddings: Mapping[str, Tensor],
    special_token_ids: Mapping[str, int],
) -> Tensor:
    """``text`` [S, B, H] with the modalities' rows in place of their tokens' embeddings.

    Rows take the dtype of ``text``. A tensor of 0 rows stays in the graph, so that the backward
    runs on all ranks alike.
    """
    seq_length, batch_size, hidden = text.shape
    flat = text.reshape(-1, hidden)
    for name, rows in modality_embeddings.items():
        is_token = (input_ids == special_token_ids[name]).flatten()
        # The host knows the number of places, so nonzero need not wait for the device.
        places = torch.nonzero_static(is_token, size=len(rows)).squeeze(1)
        places = places % seq_length * batch_size + places // seq_length  # [B, S] to [S, B]
        flat = flat.index_copy(0, places, rows.to(flat.dtype))
    return flat.view(text.shape)


def with_whole_gradient(model: MegatronModule, rows: Tensor) -> Tensor:
    """Return the same rows; the rank that sends their gradient back gets the sum over all CP ranks.

    All TP and CP ranks of a stage receive the same rows, and the first of them sends the gradient
    back. A CP rank uses only the rows of its own tokens, so the gradients of all CP ranks must be
    added. Rows of colocated modules are returned unchanged: their bridge adds the gradients up.

    Args:
        rows: ``[n, H]``, the same on all TP and CP ranks of a stage.
    """
    if model.role.mode is ModuleLayout.COLOCATED:
        return rows
    groups = unwrap_model(model.language_model).pg_collection
    if groups.cp.size() == 1 or groups.tp.rank() > 0:
        return rows
    return _GradientToFirst.apply(rows, groups.cp)


class _GradientToFirst(torch.autograd.Function):
    """Identity whose gradient is summed over a group onto the group's first rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.reduce(total, dist.get_global_rank(ctx.group, 0), group=ctx.group)
        return total, None
