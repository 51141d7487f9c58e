# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The timeline of a step, from the cost of a microbatch in each stage and Megatron's own order.

Colocated modules encode a macro-batch, run the language model's pipeline on its microbatches, and
run the encoder's backward; with a pipeline, the whole step is one macro-batch (three phases).
Non-colocated modules form one pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import add
from typing import NamedTuple

from examples.mimo.common.layout import Layouts
from examples.mimo.nemotron_vlm.planner.layers import BACKWARD
from examples.mimo.nemotron_vlm.planner.stage_order import order_of_stage

Span = tuple[str, float, float]
"""A span of time: phase, begin and end."""
ENCODE, RETURN, ENCODER_BACKWARD = "encoder forward", "return", "encoder backward"
"""What each stage does for a macro-batch; a return hands its gradients back, in no time."""


@dataclass(frozen=True)
class Cost:
    """Time of forward and backward of one or several microbatches, in part of the model."""

    encoder: float = 0.0  # compute
    language: float = 0.0  # compute
    recompute: float = 0.0  # recomputed forwards, with their collectives
    tensor: float = 0.0  # collectives of tensor parallelism
    experts: float = 0.0  # and so on
    context: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, vars(self).values(), vars(other).values()))

    def times(self, factor: float) -> Cost:
        """Return the cost multiplied by ``factor``."""
        return Cost(*(factor * time for time in vars(self).values()))

    @property
    def total(self) -> float:
        """Time of all parts together."""
        return sum(vars(self).values())

    @property
    def forward(self) -> float:
        """Time of the forward: a third of the compute and half of the collectives."""
        compute = (self.encoder + self.language) / (1 + BACKWARD)
        return compute + (self.tensor + self.experts + self.context) / 2

    @property
    def backward(self) -> float:
        """Time of the backward: what the forward leaves of the total, recompute included."""
        return self.total - self.forward


class Stage(NamedTuple):
    """A stage of the pipeline.

    module: 'encoder' or 'language'. ranks: number of ranks that share it. number: its place in its
    module's own pipeline. encoder: which of several encoders it is of.
    """

    module: str
    name: str
    ranks: int
    number: int = 0
    encoder: int = 0


@cache
def stages_of_pipeline(layouts: Layouts) -> list[Stage]:
    """Return the pipeline's stages; those of a separate encoder come first."""
    apart, stages = layouts.encoders if layouts.non_colocated else (), []
    for place, lay in enumerate(apart):
        name, ranks = f"encoder {place}," if len(apart) > 1 else "encoder", lay.size // lay.pp
        stages += [Stage("encoder", f"{name} {n}", ranks, n, place) for n in range(lay.pp)]
    lay = layouts.language
    stages += [Stage("language", f"stage {n}", lay.size // lay.pp, n) for n in range(lay.pp)]
    return stages if len(stages) > 1 else [stages[0]._replace(name="all ranks")]


@dataclass(frozen=True)
class Work:
    """The work of the ranks in a step, and how long each piece of it takes."""

    stages: list[Stage]
    chunks: tuple[Cost, ...]  # of a microbatch by virtual stage, in the pipeline's order
    microbatches: int  # of a step
    encoder: Cost = Cost()  # of a macro-batch, if the encoder is no stage of the pipeline
    at_once: int = 1  # microbatches of a macro-batch
    hop: float = 0.0  # time that a tensor takes to the next stage
    bridge: float = 0.0  # time of the bridge in a step, if it is no hop of the pipeline
    overhead: float = 0.0  # time of a microbatch on each stage in addition to its layers

    @property
    def macro_batches(self) -> float:
        """Number of macro-batches in a step; the last may be a part of one."""
        return self.microbatches / self.at_once

    @property
    def by_stage(self) -> list[Cost]:
        """Cost of a microbatch by stage, summed over its virtual stages."""
        size = len(self.stages)
        return [sum(self.chunks[stage::size], Cost()) for stage in range(size)]

    @property
    def vpp(self) -> int:
        """Virtual stages of each stage."""
        return len(self.chunks) // len(self.stages)

    def encoding(self, way: str, k: int) -> float:
        """Return the time of macro-batch ``k``, bridge included."""
        part = min(self.at_once, self.microbatches - k * self.at_once) / self.at_once
        return part * (getattr(self.encoder, way) + self.bridge / 2 / self.macro_batches)

    def operation(self, way: str, virtual: int) -> float:
        """Return the time of a microbatch's ``forward`` or ``backward`` in a virtual stage."""
        return getattr(self.chunks[virtual], way) + self.overhead / 2 / self.vpp


_Action = tuple[str, int, int]
"""An operation, its virtual stage and microbatch; or the encoder's, a stage and macro-batch."""


def timeline(work: Work) -> list[list[Span]]:
    """Simulate a step up to the end of its backward; return the spans of each stage.

    Stages run 1F1B, interleaved with virtual stages, in Megatron's order of microbatches.
    """
    stages = range(len(work.stages))
    orders = [deque(_actions(stage, work)) for stage in stages]
    done: dict[_Action, float] = {}
    spans: list[list[Span]] = [[] for _ in stages]
    while any(orders):
        for stage, order in enumerate(orders):
            now = spans[stage][-1][2] if spans[stage] else 0.0
            while order and all(source in done for source in _sources(work, *order[0])):
                action = way, place, number = order.popleft()
                is_hop = way == "backward" or (way == "forward" and place > 0)
                wait = work.hop if is_hop else 0.0
                arrived = (done[source] + wait for source in _sources(work, *action))
                done[action] = begin = max([now, *arrived])
                if way != RETURN:
                    name, length = _name_and_time(work, stage, *action)
                    done[action] = now = begin + length
                    spans[stage].append((name, begin, now))
    return spans


def _sources(work: Work, way: str, place: int, number: int) -> list[_Action]:
    """Return what an action waits for; without an encoder of its own, the first stage's input."""
    size, is_apart = len(work.stages), work.stages[0].module == "encoder"
    if way == ENCODER_BACKWARD:
        return [(RETURN, stage, number) for stage in range(size)]
    if (way, place) == ("forward", 0):
        encoded = [(ENCODE, stage, number // work.at_once) for stage in range(size)]
        return [] if is_apart else encoded
    source = place - 1 if way == "forward" else place + 1
    is_sent = way in ("forward", "backward") and source < size * work.vpp
    return [(way, source, number)] if is_sent else []


def _name_and_time(work: Work, stage: int, way: str, place: int, number: int) -> tuple[str, float]:
    if way in (ENCODE, ENCODER_BACKWARD):
        return way, work.encoding(way.removeprefix("encoder "), number)
    return f"{work.stages[stage].module} {way}", work.operation(way, place)


def _actions(stage: int, work: Work) -> Iterator[_Action]:
    """Yield all actions of a stage, in order.

    A macro-batch is encoded before its first forward and goes back after its last backward.
    """
    size, is_apart = len(work.stages), work.stages[0].module == "encoder"
    at_once = work.at_once if size == 1 else work.microbatches
    for k, first in enumerate(range(0, work.microbatches, at_once)):
        count = min(at_once, work.microbatches - first)
        if not is_apart:
            yield ENCODE, stage, k
        for way, chunk, number in order_of_stage(stage, size, count, work.vpp):
            yield way, chunk * size + stage, first + number
        if not is_apart:
            yield RETURN, stage, k
            yield ENCODER_BACKWARD, stage, k
