# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run the encoders before and after the language model's work on each macro-batch."""

import contextlib
from collections.abc import Iterator

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.mimo.forward.macro_batches import MacroBatch, Microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.grad_finalization import no_encoder_grad_sync
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model


class EncoderWork:
    """One rank's encoder work of a step; construction encodes the first macro-batch.

    Another macro-batch is encoded when the language model draws its first microbatch, after the
    backward of the one before. With a pipeline, whose stages draw at different times, a step must
    be one macro-batch. Collective over all ranks of the model.

    Args:
        stages: one MimoModel for each virtual stage; the first holds the encoders.
        microbatches: the step's microbatches, dicts of MimoModel's keyword arguments; drawn
            macro-batch by macro-batch.
        count: microbatches of the step.
        size: microbatches of a macro-batch; the last one of a step may have fewer.
    """

    def __init__(
        self, stages: list[MimoModel], microbatches: Iterator[Microbatch], count: int, size: int
    ) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._count, self._size = count, size
        encoders = stages[0].modality_submodules
        self._skip, self._always = (
            {name for name, each in encoders.items() if getattr(unwrap_model(each), flag, False)}
            for flag in ("skips_blank", "runs_on_every_rank")
        )
        for name in self._skip - self._always:
            _gather_parameters(encoders[name])
        with no_encoder_grad_sync(stages):
            pass  # now each encoder's last backward starts its reductions, or none does
        self._held = self._encode(0)

    def microbatches(self, chunk: int) -> Iterator[Microbatch]:
        """Microbatches of virtual stage ``chunk``; drawing one marks the start of its forward."""
        for number in range(self._count):
            place = number % self._size
            if number and place == 0:
                self._backward(is_last=False)
                self._held = self._encode(number)
            if (chunk, place) == (0, 0):
                self._held.receive()
            yield self._held.microbatches[place]
            if chunk == len(self._stages) - 1:
                self._held.microbatches[place] = None

    def finish(self) -> None:
        """Run the encoders' backward of the last macro-batch."""
        self._backward(is_last=True)

    def _encode(self, first: int) -> MacroBatch:
        size = min(self._size, self._count - first)
        microbatches = [dict(next(self._microbatches)) for _ in range(size)]
        recompute = self._stages[0].mimo_config.encoder_schedule.recompute
        # In the first forward of a step DDP gathers the parameters of encoders that run on every
        # rank, in the last backward it reduces their gradients; all ranks take part in both.
        is_inner = 0 < first < self._count - size
        skipped = self._skip if is_inner else self._skip - self._always
        return MacroBatch(self._stages[0], microbatches, recompute, skipped)

    def _backward(self, is_last: bool) -> None:
        hold = contextlib.nullcontext() if is_last else no_encoder_grad_sync(self._stages)
        held, self._held = self._held, None
        with hold:
            held.backward()


def _gather_parameters(module: MegatronModule) -> None:
    """Gather an encoder's parameters before a step, where DDP leaves this to its first forward.

    The encoder may have no forward on this rank, and its peers would wait for ever.
    """
    if isinstance(module, DistributedDataParallel) and module.remove_forward_pre_hook_handles:
        for group in reversed(module.bucket_groups + module.expert_parallel_bucket_groups):
            group.finish_param_sync(skip_next_bucket_dispatch=True)
