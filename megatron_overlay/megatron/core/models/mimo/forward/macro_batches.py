# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run the encoders' forward and backward on several microbatches at once.

A *macro-batch* is a run of microbatches whose inputs go through one forward of the encoders, and
whose rows cross the bridge at once. The language model consumes the rows microbatch by microbatch:
views of them are leaves of its graph, whose gradients accumulate in one buffer. When the buffer has
the gradients of the whole macro-batch, it crosses the bridge back and the encoders run their
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.forward.encoding import ModalityInputs, communicate, encode
from megatron.core.models.mimo.forward.modality_rows import Tokens, row_counts
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.partition.language_batch import packed_parameters
from megatron.core.models.mimo.schedule.grad_finalization import no_encoder_grad_sync

Microbatch = dict[str, object]


class MacroBatches:
    """The microbatches of a step, with ``encoder_embeddings`` in place of ``modality_inputs``.

    An iterator, collective over all ranks of the model. Drawing the first microbatch of a
    macro-batch runs the encoders' backward of the previous macro-batch, whose microbatches must
    have run theirs, and then encodes the new macro-batch.

    Args:
        stages: one MimoModel for each virtual stage; the first holds the encoders.
        microbatches: dicts of MimoModel's keyword arguments.
        count: microbatches of the step.
        size: microbatches of a macro-batch; the last one of a step may have fewer.
    """

    def __init__(
        self, stages: list[MimoModel], microbatches: Iterator[Microbatch], count: int, size: int
    ) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._left, self._size = count, size
        self._encoded: list[Rows] = []
        self._ready: list[Microbatch] = []

    def __iter__(self) -> MacroBatches:
        return self

    def __next__(self) -> Microbatch:
        if not self._ready:
            if not self._left:
                raise StopIteration
            with no_encoder_grad_sync(self._stages):
                self.finish()
            size = min(self._size, self._left)
            self._ready = self._encode([dict(next(self._microbatches)) for _ in range(size)])
            self._left -= size
        return self._ready.pop(0)

    def finish(self) -> None:
        """Run the encoders' backward of the last macro-batch, after that of its microbatches."""
        trained = [(rows.whole, rows.grad) for rows in self._encoded if rows.grad is not None]
        self._encoded = []
        if trained:
            torch.autograd.backward(*map(list, zip(*trained, strict=True)))

    def _encode(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        model = self._stages[0]
        shares, tokens = take_inputs(microbatches)
        recompute = getattr(model, "recompute_encoder_shares", None)
        rows = communicate(model, encode(model, shares, recompute), tokens)
        self._encoded = [cut(model, name, whole, tokens) for name, whole in rows.items()]
        for number, microbatch in enumerate(microbatches):
            microbatch["encoder_embeddings"] = {
                rows.name: rows.leaves[number] for rows in self._encoded if rows.leaves
            }
        return microbatches


def take_inputs(microbatches: list[Microbatch]) -> tuple[list[ModalityInputs | None], list[Tokens]]:
    """Remove the encoders' inputs and the host tokens from the microbatches, and return them.

    Returns:
        For each microbatch the encoders' inputs, and the tokens by which the bridge plans.
    """
    shares, tokens = [], []
    for microbatch in microbatches:
        shares.append(microbatch.pop("modality_inputs", None))
        host = microbatch.pop("host_tokens", None)
        packed = packed_parameters(microbatch.get("packing_kwargs"), host)
        microbatch["packing_kwargs"] = packed
        tokens.append(Tokens(microbatch["input_ids"], packed, host))
    return shares, tokens


@dataclass
class Rows:
    """One modality's rows of a macro-batch, split by microbatch.

    Attributes:
        name: name of the modality.
        whole: all rows ``[rows, H]``, with their autograd history.
        leaves: for each microbatch a view ``[its rows, H]`` without the history; empty on later
            stages.
        grad: buffer ``[rows, H]`` in which the leaves' gradients accumulate; None if the rows need
            no gradient.
    """

    name: str
    whole: Tensor
    leaves: list[Tensor]
    grad: Tensor | None


def cut(model: MimoModel, name: str, whole: Tensor, microbatches: list[Tokens]) -> Rows:
    """Split rows ``[rows, H]`` that the bridge has delivered by microbatch."""
    grad = torch.zeros_like(whole) if whole.requires_grad else None
    if not model.role.is_first_stage(MIMO_LANGUAGE_MODULE_KEY):
        return Rows(name, whole, [], grad)
    counts = row_counts(microbatches, model.special_token_ids[name])  # they add up to len(whole)
    leaves = list(whole.detach().split(counts))
    if grad is not None:
        for leaf, part in zip(leaves, grad.split(counts), strict=True):
            leaf.requires_grad_().grad = part
    return Rows(name, whole, leaves, grad)
