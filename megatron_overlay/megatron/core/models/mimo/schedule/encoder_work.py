# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run a step's encoder pieces where a plan puts them among the language model's operations."""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch

from megatron.core.models.mimo.forward.macro_batches import MacroBatch, Microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.bubble_plan import (
    Costs,
    bubble_plan,
    pieces_around_the_pipeline,
    pieces_in_turn,
)
from megatron.core.models.mimo.schedule.grad_finalization import no_encoder_grad_sync
from megatron.core.models.mimo.schedule.graph_capture import capture_each_use
from megatron.core.pipeline_parallel.filled_waits import open_links
from megatron.core.pipeline_parallel.stage_order import order_of_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model


def prepare_bubbles(stages: list[MimoModel]) -> None:
    """Prepare a model to encode where pipeline stages would wait, as its settings ask for.

    Collective over the world, as it makes process groups.

    Raises:
        ValueError: the model or its layout does not allow encoding in bubbles.
    """
    config = get_model_config(stages[0])
    pp_group = unwrap_model(stages[0].language_model).pg_collection.pp
    if pp_group.size() == 1:
        raise ValueError("encoding in bubbles needs a pipeline of the language model")
    if len(stages) > 1 and not config.overlap_p2p_comm:
        raise ValueError("encoding in bubbles needs overlap_p2p_comm with virtual stages")
    for name in ("variable_seq_lengths", "overlap_moe_expert_parallel_comm"):
        if getattr(config, name):
            raise ValueError(f"encoding in bubbles does not go with {name}")
    for (name, _), bridge in stages[0].colocated_comms.items():
        topology = bridge.topology
        places = {(topology.src[rank].dp, at.pp) for rank, at in topology.dest.items()}
        if len(places) > topology.src_dp:
            raise ValueError(
                f"encoding in bubbles needs each TP group of {name} in one pipeline stage; use a "
                f"smaller tp for {name}, or train in three phases"
            )
    for bridge in stages[0].colocated_comms.values():
        bridge.make_return_group()
    open_links(pp_group, config)
    for encoders in stages[0].modality_submodules.values():
        capture_each_use(encoders)


def loads_kernels(model: MimoModel) -> bool:
    """Return whether a step in bubbles is the model's first, on a GPU.

    It runs all pieces before and after the pipeline: loading a kernel may make CUDA wait for all
    work on the device, and so for another rank that waits for this one.
    """
    return _is_on_gpu(model) and not any(
        bridge.ran_in_bubbles for bridge in model.colocated_comms.values()
    )


def _is_on_gpu(model: MimoModel) -> bool:
    return next(model.parameters()).is_cuda


class EncoderWork:
    """One rank's encoder pieces of a step; construction runs those that precede everything else.

    Without a pipeline, each macro-batch is encoded when its first microbatch is drawn, after the
    backward of the one before. With one, all are encoded before it, or in its bubbles. Collective
    over all ranks of the model.

    Args:
        stages: one MimoModel for each virtual stage; the first holds the encoders.
        microbatches: the step's microbatches, dicts of MimoModel's keyword arguments; drawn
            macro-batch by macro-batch.
        size: microbatches of a macro-batch; the last one of a step may have fewer.
        in_bubbles: fill the pipeline's bubbles, which takes microbatches with a ``batch_plan``.
    """

    def __init__(
        self,
        stages: list[MimoModel],
        microbatches: Iterator[Microbatch],
        count: int,
        size: int,
        groups: ProcessGroupCollection,
        in_bubbles: bool,
    ) -> None:
        self._stages, self._microbatches, self._size = stages, microbatches, size
        self._count, self._macro_batches, self._in_bubbles = count, {}, in_bubbles
        vpp, group = len(stages), get_model_config(stages[0]).microbatch_group_size_per_vp_stage
        stage, pp = groups.pp.rank(), groups.pp.size()
        trained = torch.is_grad_enabled() and any(
            parameter.requires_grad
            for module in stages[0].modality_submodules.values()
            for parameter in module.parameters()
        )
        order = list(enumerate(order_of_stage(stage, pp, count, vpp, group)))
        settings = stages[0].mimo_config.encoder_schedule
        self._recompute = settings.recompute
        if pp == 1:
            self._before = pieces_in_turn(count, size, trained)
        elif in_bubbles and not loads_kernels(stages[0]):
            costs = Costs.of_share(settings.share, vpp)
            plan = bubble_plan(pp, count, size, vpp, trained, costs, group)
            self._before = plan.before[stage]
        else:
            self._before = pieces_around_the_pipeline(len(order), -(-count // size), trained)
            if in_bubbles:
                self._recompute = size  # so that no more activations are kept than in later steps
        for bridge in stages[0].colocated_comms.values():
            bridge.ran_in_bubbles |= in_bubbles
        with no_encoder_grad_sync(stages):
            pass  # now each encoder's last backward starts its reductions, or none does
        self._place = 0
        self._forwards = deque(place for place, (way, _, _) in order if way == "forward")
        first, last = (0, 0), (pp - 1, vpp - 1)
        self._receives = {
            name: deque(i for i, (w, chunk, _) in order if w == way and (stage, chunk) != end)
            for name, way, end in (
                ("recv_prev", "forward", first),
                ("recv_next", "backward", last),
            )
        }
        self._advance(0)

    def work(self, wait: str) -> None:
        """Run the pieces due before the wait ``wait``; the callback of `FilledWaits`."""
        place = self._receives[wait].popleft()
        self._advance(min(place, self._forwards[0]) if self._forwards else place)

    def microbatches(self, chunk: int) -> Iterator[Microbatch]:
        """Microbatches of virtual stage ``chunk``; drawing one marks the start of its forward."""
        for number in range(self._count):
            self._advance(self._forwards.popleft())
            macro_batch, place = divmod(number, self._size)
            held = self._macro_batches[macro_batch]
            if (chunk, place) == (0, 0):
                held.receive()
            yield held.microbatches[place]
            if chunk == len(self._stages) - 1:
                held.microbatches[place] = None

    def finish(self) -> None:
        """Run the pieces that follow the last operation."""
        self._advance(len(self._before) - 1)

    def _advance(self, place: int) -> None:
        while self._place <= place:
            for kind, macro_batch in self._before[self._place]:
                getattr(self, f"_{kind}")(macro_batch)
            self._place += 1

    def _encode(self, k: int) -> None:
        size = min(self._size, self._count - k * self._size)
        microbatches = [dict(next(self._microbatches)) for _ in range(size)]
        if self._in_bubbles and any("batch_plan" not in found for found in microbatches):
            raise ValueError(
                "encoding in bubbles needs microbatches with a batch_plan; without it, train in "
                "three phases"
            )
        self._macro_batches[k] = MacroBatch(self._stages[0], microbatches, self._recompute)

    def _return(self, k: int) -> None:
        self._macro_batches[k].begin_return()

    def _backward(self, k: int) -> None:
        is_last = (k + 1) * self._size >= self._count
        hold = contextlib.nullcontext() if is_last else no_encoder_grad_sync(self._stages)
        with hold:
            self._macro_batches.pop(k).backward()
