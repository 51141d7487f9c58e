# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The language model's pipeline in a colocated MimoModel: where a rank stands, and what it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megatron.core.models.mimo.partition.language_batch import padding_arguments
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.models.mimo.model.base import MimoModel


class StagePosition(NamedTuple):
    """Whether a stage takes the embeddings, and whether it makes the loss; virtual ones counted."""

    is_first_stage: bool
    is_last_stage: bool


def stage_position(
    grid: HyperCommGrid, rank: int, vp_stage: int | None = None, vp_size: int | None = None
) -> StagePosition:
    """Position of one rank's (virtual) stage in a module's pipeline; needs no process group.

    Args:
        grid: of the module; without ``pp`` it is one stage.
        rank: global rank, in the grid.
        vp_stage, vp_size: which of how many virtual stages of the rank.
    """
    stage, stages = 0, 1
    if "pp" in grid.dim_names:
        (pipeline,) = (ranks for ranks in grid.get_rank_enum("pp") if rank in ranks)
        stage, stages = pipeline.index(rank), len(pipeline)
    return StagePosition(
        is_first_stage=stage == 0 and not vp_stage,
        is_last_stage=stage == stages - 1 and (vp_stage or 0) == (vp_size or 1) - 1,
    )


def forward_later_stage(
    model: MimoModel,
    input_ids: Tensor,
    position_ids: Tensor | None,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    packed_seq_params: PackedSeqParams | None,
) -> tuple[Tensor, Tensor | None]:
    """Run the language model on hidden states that ``model.set_input_tensor`` was given.

    Args:
        input_ids, position_ids, labels, loss_mask: ``[B, S]``, whole; they are sharded here.
        packed_seq_params: of a packed batch, with global ``cu_seqlens``.

    Returns:
        Hidden states ``[padded/(cp·tp), B, H]``, or on the last stage what the language model makes
        of them; and the loss mask ``[B, padded/cp]``.
    """
    unwrap_model(model.language_model).set_input_tensor(model.input_tensors)
    padding = {}
    if model.partition_adapter is not None:
        padding = padding_arguments(input_ids, model.partition_adapter, packed_seq_params)
        _, labels, loss_mask, _, packed_seq_params = model.partition_adapter.shard(
            None, labels, loss_mask, None, packed_seq_params
        )
    output = model.language_model(
        input_ids=None,
        position_ids=position_ids,
        decoder_input=None,
        labels=labels,
        attention_mask=None,
        packed_seq_params=packed_seq_params,
        **padding,
    )
    return output, loss_mask
