# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (MTP) of a hybrid model whose groups come from a grid.

Upstream reads the pipeline stage and the group of the log from the global ``parallel_state``, and
weighs a rank's loss by that rank's own counts of tokens. Where the global state exists, all is
upstream's.
"""

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    _compute_mtp_acceptance_counts,
    mtp_on_this_rank,
    process_mtp_loss,
    roll_tensor,
)


def is_on_stage(post_process: bool, **of_global_stage) -> bool:
    """Return whether a model with MTP layers has them on this stage: on the last one."""
    if parallel_state.is_initialized():
        return mtp_on_this_rank(**of_global_stage)
    return post_process


def predict(model: LanguageModule, input_ids: Tensor | None, **of_layers) -> Tensor:
    """Return the model's own hidden states, then each depth's; those alone in a forward without
    tokens.

    Later tokens are embedded as the hidden states are cut over TP ranks: a language model within
    another model leaves that cut of its own input to the outer one.
    """
    if input_ids is None:
        return of_layers["hidden_states"]
    if model.config.sequence_parallel and not model.embedding.scatter_to_sequence_parallel:

        def embed(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
            tokens = model.embedding(input_ids=input_ids, position_ids=position_ids)
            return scatter_to_sequence_parallel_region(tokens, group=model.pg_collection.tp)

        of_layers["embedding"] = embed
    return model.mtp(input_ids=input_ids, **of_layers)


def process_loss(
    model: LanguageModule,
    hidden_states: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    input_ids: Tensor | None,
    **others,
) -> Tensor:
    """Attach the MTP losses to the model's own hidden states, which it returns.

    Like the model's own loss, they are sums over tokens (``calculate_per_token_loss``), which the
    model's global token count divides later. Upstream would scale them by the counts of a rank and
    a microbatch, and drop those of a CP rank that has no token of the model's own loss.

    Args:
        hidden_states: ``[(1 + depths) · S/(cp·tp), B, H]``, the model's own, then each depth's.
        labels, loss_mask: ``[B, S/cp]``, of the model's own loss.
        others: as upstream takes them; ``output_weight`` and ``packed_seq_params`` are read here.
    """
    if input_ids is None:
        return hidden_states
    if parallel_state.is_initialized():
        given = {"hidden_states": hidden_states, "labels": labels, "loss_mask": loss_mask}
        return process_mtp_loss(input_ids=input_ids, **given, **others)
    config, groups, packed = model.config, model.pg_collection, others["packed_seq_params"]
    own, *predicting = hidden_states.chunk(1 + config.mtp_num_layers)
    weight = config.mtp_loss_scaling_factor / config.mtp_num_layers
    for number, states in enumerate(predicting):
        labels, loss_mask = (
            roll_tensor(tokens, cp_group=groups.cp, packed_seq_params=packed)[0]
            for tokens in (labels, loss_mask)
        )
        logits, _ = model.output_layer(states, weight=others["output_weight"])
        losses = loss_mask * model.compute_language_model_loss(labels, logits)
        if model.training:
            counts = _compute_mtp_acceptance_counts(
                logits, labels, loss_mask, model.output_layer, None, groups.tp
            )
            _log(losses.sum(), *counts, number, model)
        own = MTPLossAutoScaler.apply(own, weight * losses)
    return own


def _log(loss: Tensor, right: Tensor, total: Tensor, number: int, model: LanguageModule) -> None:
    """Log a rank's mean loss, and counts of its predictions, of which Megatron takes the sums."""
    mean = loss / torch.clamp(total, min=1)
    depths, group = model.config.mtp_num_layers, model.pg_collection.dp_cp
    save = MTPLossLoggingHelper.save_metrics_to_tracker
    save(mean, right, total, number, depths, avg_group=group)
