# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train a colocated MimoModel: encode, language model, back through the encoders.

1. All ranks run the encoders on their part of a macro-batch; the bridge hands the rows to the
   ranks of the language model's first stage.
2. The language model trains on the macro-batch's microbatches one by one.
3. The bridge takes the gradients back to the ranks that own the rows, and the encoders run their
   backward.

Where the language model is a pipeline (1F1B, interleaved with virtual stages), the macro-batch is
the whole batch: three phases a step, which with p stages, m microbatches and E and L the ideal
times of encoders and language model takes about E + L·(1 + (p − 1)/m). Without one, a macro-batch
is as many microbatches as is asked for, else one.

Where reductions overlap the backward, the language model's begin in its last one and go on beside
the last third phase, in which the encoders' begin; gradients are final after that phase.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.mimo.encoder_in_bubbles import EncoderInBubbles
from megatron.core.models.mimo.graph_capture import capture_deferred, nothing_recorded
from megatron.core.models.mimo.macro_batches import MacroBatches, Microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.filled_waits import FilledWaits
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.utils import get_model_config


def colocated_forward_backward(
    *,
    data_iterator: Iterator[Microbatch] | list[Iterator[Microbatch]],
    model: MimoModel | list[MimoModel],
    pg_collection: MultiModuleProcessGroupCollection,
    p2p_communicator: P2PCommunicator | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    decoder_seq_length: int | None = None,
    **arguments,
) -> list:
    """:func:`colocated_forward_backward_with_pp` as Megatron's training loop calls it.

    Args:
        data_iterator: of microbatches; of a list, one for each virtual stage, the first is read.
        model, arguments: as in Megatron's schedules.
        pg_collection: of the modules of this rank.
        p2p_communicator, adjust_tensor_shapes_fn, decoder_seq_length: not used.
    """
    if isinstance(data_iterator, list):
        data_iterator = data_iterator[0]
    groups = pg_collection.get_language_model_collection()
    return colocated_forward_backward_with_pp(
        data_iterator=data_iterator, model=model, pg_collection=groups, **arguments
    )


def colocated_forward_backward_with_pp(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator[Microbatch],
    model: MimoModel | list[MimoModel],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    pg_collection: ProcessGroupCollection,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    force_all_reduce: bool = False,
) -> list:
    """Forward and backward over one batch; gradients are final on return.

    ``forward_step_func`` gets an iterator of microbatches without ``modality_inputs``: their place
    is taken by ``encoder_embeddings``. It hands them to the model as keyword arguments.

    Args:
        forward_step_func, collect_non_loss_data, first_val_step, forward_only, force_all_reduce: as
            in Megatron's schedules.
        data_iterator: of ``num_microbatches`` dicts with MimoModel's keyword arguments. A
            microbatch is what this rank's language model makes of it, on every stage;
            its ``modality_inputs`` are the i-th part of what this rank *encodes* of its
            macro-batch: a DP rank encodes and consumes consecutive samples of it, so that rows lie
            in the order of microbatches on both sides. With ``host_tokens`` (a
            :class:`HostTokens`) in each of them, nothing here waits for the device.
        model: one MimoModel, or one for each virtual stage, of which the first holds the encoders.
        num_microbatches: of a step; with virtual stages a multiple of the pipeline's size.
        seq_length: tokens of a sequence, padded to what CP and SP divide.
        micro_batch_size: sequences of a microbatch.
        pg_collection: the language model's groups.

    Returns:
        What the loss function reported of each microbatch on the last stage; else empty.
    """
    stages = model if isinstance(model, list) else [model]
    config = get_model_config(stages[0])
    schedule = schedules.get_forward_backward_func(
        pp_size=pg_collection.pp.size(), vp_size=config.virtual_pipeline_model_parallel_size
    )
    pipelined = pg_collection.pp.size() > 1
    in_bubbles = pipelined and getattr(stages[0], "bubble_costs", None) is not None
    size = getattr(stages[0], "encoder_macro_batch", 1)
    if pipelined and not in_bubbles:
        size = num_microbatches
    communicator = P2PCommunicator(pg_collection.pp, config)
    fills_bubbles = in_bubbles and not forward_only
    # There, the first step on GPUs has another order than those to come.
    recorded = not (fills_bubbles and stages[0].has_kernels_to_load)
    held_back = contextlib.nullcontext() if recorded else nothing_recorded()
    with torch.set_grad_enabled(not forward_only), held_back:
        if fills_bubbles:
            encoded = EncoderInBubbles(stages, data_iterator, num_microbatches, size, pg_collection)
            iterators = [encoded.microbatches(chunk) for chunk in range(len(stages))]
            communicator = FilledWaits(pg_collection.pp, config, encoded.work)
        else:
            encoded = MacroBatches(stages, data_iterator, num_microbatches, size)
            # All ranks encode together, and later stages would draw their microbatches later.
            microbatches = list(encoded) if pipelined else encoded
            iterators = [iter(microbatches) for _ in stages]
        with _grad_finalization_deferred(config) as deferred, capture_deferred():
            reports = schedule(
                forward_step_func=forward_step_func,
                data_iterator=iterators,
                model=stages,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                p2p_communicator=communicator,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        encoded.finish()
        if isinstance(communicator, FilledWaits):
            communicator.finish()
    if deferred.called and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            stages,
            deferred.num_tokens,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )
    if config.cuda_graph_impl == "local" and recorded:
        schedules.create_cudagraphs()
    return reports


@dataclass
class _Deferred:
    """What the pipeline would have finalized the gradients with."""

    called: bool = False
    num_tokens: torch.Tensor | None = None


@contextlib.contextmanager
def _grad_finalization_deferred(config: ModelParallelConfig) -> Iterator[_Deferred]:
    """Note the token count instead of finalizing."""
    deferred = _Deferred()

    def note(model, num_tokens=None, **_):
        deferred.called, deferred.num_tokens = True, num_tokens

    changed = {
        "finalize_model_grads_func": note,
        "grad_sync_func": None,
        "param_sync_func": None,
    }
    before = {name: getattr(config, name) for name in changed}
    for name, value in changed.items():
        setattr(config, name, value)
    try:
        yield deferred
    finally:
        for name, value in before.items():
            setattr(config, name, value)
