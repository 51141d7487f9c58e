# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The language model's input: text embeddings, with modalities' rows at their tokens' places."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model


def embed_tokens(
    model: MegatronModule,
    input_ids: Tensor,
    position_ids: Tensor | None,
    modality_embeddings: Mapping[str, Tensor],
) -> Tensor:
    """Embeddings ``[S, B, H]`` of a batch.

    A bridge hands over as many rows as there are tokens for them, so that the host need not wait
    for their count. Without one, upstream's methods count them.

    Args:
        model: the MimoModel.
        input_ids, position_ids: ``[B, S]``.
        modality_embeddings: ``[rows, H]`` of each modality, in the order of its tokens.

    Raises:
        ValueError: without a bridge, there are more tokens of a modality than rows, or fewer.
    """
    if not model.colocated_comms:
        text = model.get_text_embeddings(input_ids, position_ids, model.special_token_ids)
        return model.align_embeddings_by_token_positions(
            {**modality_embeddings, "text": text}, input_ids, model.special_token_ids
        )
    text_ids = input_ids
    for token_id in model.special_token_ids.values():
        text_ids = text_ids.masked_fill(input_ids == token_id, 0)
    embedding = unwrap_model(model.language_model).embedding
    text = embedding(input_ids=text_ids, position_ids=position_ids)
    return place_rows(text, input_ids, modality_embeddings, model.special_token_ids)


def place_rows(
    text: Tensor,
    input_ids: Tensor,
    modality_embeddings: Mapping[str, Tensor],
    special_token_ids: Mapping[str, int],
) -> Tensor:
    """``text`` [S, B, H] with modalities' rows in place of their tokens' embeddings.

    Rows take the dtype of ``text``. They stay in the graph where there are none, so that the
    backward runs on all ranks alike.
    """
    seq_length, batch_size, hidden = text.shape
    flat = text.transpose(0, 1).reshape(-1, hidden)
    for name, rows in modality_embeddings.items():
        is_token = (input_ids == special_token_ids[name]).flatten()
        # The number is known on the host, and with it the size of the result.
        places = torch.nonzero_static(is_token, size=len(rows)).squeeze(1)
        flat = flat.index_copy(0, places, rows.to(flat.dtype))
    return flat.view(batch_size, seq_length, hidden).transpose(0, 1).contiguous()
