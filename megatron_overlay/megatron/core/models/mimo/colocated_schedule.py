# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train a colocated MimoModel: encode, language model, back through the encoders.

1. All ranks run the encoders on their part of a macro-batch; the bridge hands the rows to the
   ranks of the language model's first stage.
2. The language model trains on the macro-batch's microbatches one by one.
3. The bridge takes the gradients back to the ranks that own the rows, and the encoders run their
   backward.

Where the language model is a pipeline (1F1B, interleaved with virtual stages), the macro-batch is
the whole batch, so a step has three phases. With p stages, m microbatches, and ideal times E of the
encoders and L of the language model, a step takes about E + L·(1 + (p − 1)/m). Without a pipeline,
a macro-batch has as many microbatches as the model's ``EncoderSchedule`` says, one by default.

Where gradient reductions overlap the backward, the language model's start in its last backward and
continue during the last third phase, in which the encoders' start. Gradients are final after it.
"""

from collections.abc import Callable, Iterator

import torch

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.forward.macro_batches import Microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.encoder_work import EncoderWork
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.transformer import colocated_graphs
from megatron.core.utils import get_model_config


def colocated_forward_backward(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator[Microbatch] | list[Iterator[Microbatch]],
    model: MimoModel | list[MimoModel],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    pg_collection: ProcessGroupCollection | MultiModuleProcessGroupCollection,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    force_all_reduce: bool = False,
    p2p_communicator: P2PCommunicator | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    decoder_seq_length: int | None = None,
    encodes_all: bool = False,
) -> list:
    """Run forward and backward over one batch; gradients are final on return.

    ``forward_step_func`` gets an iterator of microbatches that have ``encoder_embeddings`` in place
    of ``modality_inputs``, and passes each to the model as keyword arguments.

    Args:
        forward_step_func, collect_non_loss_data, first_val_step, forward_only, force_all_reduce: as
            in Megatron's schedules.
        data_iterator: yields ``num_microbatches`` dicts of MimoModel's keyword arguments. Tokens
            and labels are those that this rank's language model consumes, on every stage; the
            ``modality_inputs`` of a macro-batch's i-th microbatch are the i-th part of what this
            rank *encodes* of the macro-batch. A DP rank encodes and consumes consecutive samples,
            so rows lie in the order of the microbatches on both sides. If each microbatch brings
            a ``batch_plan`` (a :class:`BatchPlan`), nothing here waits for the device; without it
            every sample must have as many rows as any other. Of a list with an iterator for each
            virtual stage, only the first is read.
        model: one MimoModel, or one for each virtual stage, of which the first holds the encoders.
        num_microbatches: microbatches of a step; with virtual stages a multiple of the pipeline's
            size.
        seq_length: tokens of a sequence, padded to what CP and SP divide.
        micro_batch_size: sequences of a microbatch.
        pg_collection: the language model's groups, or those of all this rank's modules.
        p2p_communicator, adjust_tensor_shapes_fn, decoder_seq_length: not used.
        encodes_all: encode all microbatches at once, whatever the model's settings say.

    Returns:
        The loss function's report of each microbatch on the last stage; empty on other stages.
    """
    if isinstance(pg_collection, MultiModuleProcessGroupCollection):
        pg_collection = pg_collection.get_language_model_collection()
    if isinstance(data_iterator, list):
        data_iterator = data_iterator[0]
    stages = model if isinstance(model, list) else [model]
    config = get_model_config(stages[0])
    schedule = schedules.get_forward_backward_func(
        pp_size=pg_collection.pp.size(), vp_size=config.virtual_pipeline_model_parallel_size
    )
    settings, size = stages[0].mimo_config.encoder_schedule, num_microbatches
    if not encodes_all:
        size = settings.at_once(pg_collection.pp.size(), num_microbatches)
    counted: list[torch.Tensor | None] = []

    def note(_model, num_tokens=None, **_):
        counted.append(num_tokens)  # gradients are final after the encoders' backward alone

    deferred = replaced(
        config, finalize_model_grads_func=note, grad_sync_func=None, param_sync_func=None
    )
    # Graphs of a training step would drop out in an evaluation, and count its tokens for the
    # experts' biases.
    graphs = replaced(colocated_graphs, modules_alone=forward_only)
    with torch.set_grad_enabled(not forward_only), graphs:
        encoders = EncoderWork(stages, data_iterator, num_microbatches, size)
        iterators = [encoders.microbatches(chunk) for chunk in range(len(stages))]
        with deferred, replaced(colocated_graphs, captures_wait=True):
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
                p2p_communicator=P2PCommunicator(pg_collection.pp, config),
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        encoders.finish()
    if counted and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            stages,
            *counted,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )
    if config.cuda_graph_impl == "local" and not forward_only:
        schedules.create_cudagraphs()
    return reports


def colocated_forward_backward_with_pp(
    mimo_model: MimoModel,
    data_iterator: Iterator[Microbatch],
    num_microbatches: int,
    encoder_grid: HyperCommGrid | None = None,
    llm_grid: HyperCommGrid | None = None,
    encoder_name: str = "images",
    forward_only: bool = False,
    **schedule_kwargs,
) -> list:
    """Run :func:`colocated_forward_backward` with a step encoded at once.

    The interface is that of upstream's PR 4784.

    Args:
        mimo_model: the model; one with virtual stages is not taken.
        data_iterator: yields what the rank encodes and consumes, as there.
        num_microbatches: microbatches of the step.
        encoder_grid, llm_grid: grids of the encoder and the language model, if given, in which each
            rank must encode the samples that it consumes.
        encoder_name: the encoder's modality, for messages.
        forward_only: run no backward.
        schedule_kwargs: as :func:`colocated_forward_backward` takes them: ``pg_collection``,
            ``seq_length``, ``micro_batch_size``, …

    Raises:
        ValueError: a rank encodes other samples than it consumes, or the grids have other ranks; on
            all ranks alike.
    """
    if encoder_grid is not None and llm_grid is not None:
        spans = [(grid.rank_offset, grid.size) for grid in (encoder_grid, llm_grid)]
        if spans[0] != spans[1]:
            raise ValueError(f"{encoder_name} and the language model have other ranks: {spans}")
        topology = bridge_topology(encoder_grid, llm_grid)
        if any(topology.encodes(rank) != topology.consumes(rank) for rank in topology.dest):
            raise ValueError(
                f"ranks encode other samples of {encoder_name} than they consume, and nothing "
                "shares batches out: yield each rank's own, and leave out encoder_grid and llm_grid"
            )
    return colocated_forward_backward(
        forward_step_func=_forward_step,
        data_iterator=data_iterator,
        model=mimo_model,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        encodes_all=True,
        **schedule_kwargs,
    )


def _forward_step(microbatches: Iterator[Microbatch], model: MimoModel) -> tuple:
    output, loss_mask = model(**next(microbatches))

    def loss(output: torch.Tensor) -> tuple:
        total = (output.float() * loss_mask.float()).sum()
        return total, loss_mask.sum().int(), {"loss_reduced": total.detach()}

    return output, loss
