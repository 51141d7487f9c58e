# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The timeline of a step, from the cost of a microbatch in each stage and Megatron's own order.

Colocated modules encode a macro-batch, run the language model's pipeline on its microbatches, and
run the encoder's backward; with a pipeline, the whole step is one macro-batch (three phases), or
the encoder works where stages would wait (bubbles), as training plans it with these costs.
Non-colocated modules form one pipeline.

The unit of time is that of the costs: seconds of a machine, or shares of a step (`unit_work`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import add
from typing import NamedTuple

from examples.mimo.common.layout import Layouts
from examples.mimo.nemotron_vlm.planner.layers import BACKWARD
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.schedule.bubble_plan import BACKWARD as BACKWARD_PIECE
from megatron.core.models.mimo.schedule.bubble_plan import ENCODE, RETURN, Costs, Piece, bubble_plan
from megatron.core.pipeline_parallel.stage_order import order_of_stage

Span = tuple[str, float, float]
"""A span of time: phase, begin and end."""
ENCODER_BACKWARD = "encoder backward"
"""The piece of a plan of bubbles that is called like an operation of the language model."""


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
    """A stage of the pipeline: its module, its name, and the number of ranks that share it."""

    module: str
    name: str
    ranks: int


@cache
def stages_of_pipeline(layouts: Layouts) -> list[Stage]:
    """Return the pipeline's stages; those of a separate encoder come first."""
    stages, modules = [], [("language", "stage", layouts.language)]
    if layouts.non_colocated:
        several = len(layouts.encoders) > 1
        modules = [
            ("encoder", f"encoder {number}," if several else "encoder", layout)
            for number, layout in enumerate(layouts.encoders)
        ] + modules
    for module, name, lay in modules:
        stages += [Stage(module, f"{name} {n}", lay.size // lay.pp) for n in range(lay.pp)]
    return stages if len(stages) > 1 else [stages[0]._replace(name="all ranks")]


@dataclass(frozen=True)
class Work:
    """The work of the ranks in a step, and how long each piece of it takes."""

    stages: list[Stage]
    chunks: tuple[Cost, ...]  # of a microbatch by virtual stage, in the pipeline's order
    microbatches: int  # of a step
    encoder: Cost = Cost()  # of a macro-batch, if the encoder is no stage of the pipeline
    at_once: int = 1  # microbatches of a macro-batch
    in_bubbles: bool = False  # whether the encoder works in the pipeline's bubbles
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


def unit_work(layouts: Layouts, share: float, in_bubbles: bool, macro_batch: int) -> Work:
    """Return the work of a step of unit time, in which all stages of a module have equal work.

    A step in which no rank waits takes 1, of which the encoder takes ``share`` and the language
    model the rest. Communication takes no time. Stages of non-colocated modules take as long as if
    all ranks had shared the module's work, so a module with few ranks takes longer.

    Args:
        in_bubbles: whether the colocated encoder works in the pipeline's bubbles.
        macro_batch: microbatches encoded at once, in the bubbles or without a pipeline.
    """
    lay, number, stages = layouts.language, layouts.num_microbatches, stages_of_pipeline(layouts)
    world = layouts.language_offset + lay.size
    encoder, language = Cost(encoder=share), Cost(language=1 - share)
    chunk = language.times(world / lay.size / number / lay.vpp)
    chunks = (chunk,) * (lay.pp * lay.vpp)
    if layouts.non_colocated:
        ranks = sum(each.size for each in layouts.encoders)
        chunk = encoder.times(world / ranks / number)
        return Work(stages, (chunk,) * (len(stages) - lay.pp) + chunks, number)
    at_once = EncoderSchedule(macro_batch, in_bubbles).at_once(lay.pp, number)
    return Work(stages, chunks, number, encoder.times(at_once / number), at_once, in_bubbles)


def timeline(work: Work) -> list[list[Span]]:
    """Simulate a step up to the end of its backward; return the spans of each stage."""
    if work.in_bubbles:
        return simulate(work, work.microbatches, _bubbles_filled(work))
    if work.stages[0].module == "encoder":
        return simulate(work, work.microbatches)
    spans: list[list[Span]] = [[] for _ in work.stages]
    now = 0.0
    for k in range(math.ceil(work.macro_batches)):
        number = min(work.at_once, work.microbatches - k * work.at_once)
        lines = simulate(work, number)
        begin = now + work.encoding("forward", k)
        end = begin + max(line[-1][2] for line in lines)
        before, now = now, end + work.encoding("backward", k)
        for mine, line in zip(spans, lines, strict=True):
            mine.append(("encoder forward", before, begin))
            mine += [(name, begin + start, begin + stop) for name, start, stop in line]
            mine.append(("encoder backward", end, now))
    return spans


Pieces = tuple[tuple[tuple[Piece, ...], ...], ...]
"""Pieces of encoder work before each operation of each stage, as in ``BubblePlan``."""


def _bubbles_filled(work: Work) -> Pieces:
    """Return the pieces where training would put them at these costs."""
    language = sum(cost.total for cost in work.by_stage) / len(work.stages) * work.microbatches
    encoder = work.macro_batches * work.encoder.total
    costs = Costs.of_share(encoder / (encoder + language), work.vpp)
    sizes = len(work.stages), work.microbatches, work.at_once, work.vpp
    return bubble_plan(*sizes, costs=costs).before


_Action = tuple[str, int, int]
"""An operation, its virtual stage and microbatch; or the encoder's, a stage and macro-batch."""


def simulate(work: Work, microbatches: int, pieces: Pieces | None = None) -> list[list[Span]]:
    """Simulate 1F1B, interleaved with virtual stages, in Megatron's order of microbatches.

    Args:
        pieces: the encoder's work in the bubbles, if any.
    """
    size = len(work.stages)
    orders = [_actions(stage, size, microbatches, work.vpp, pieces) for stage in range(size)]

    def needed(way: str, place: int, number: int) -> list[_Action]:
        if way == ENCODER_BACKWARD:
            return [(RETURN, stage, number) for stage in range(size)]
        if pieces and (way, place) == ("forward", 0):
            return [(ENCODE, stage, number // work.at_once) for stage in range(size)]
        source = place - 1 if way == "forward" else place + 1
        is_sent = way in ("forward", "backward") and source not in (-1, size * work.vpp)
        return [(way, source, number)] if is_sent else []

    done: dict[_Action, float] = {}
    spans: list[list[Span]] = [[] for _ in work.stages]
    following = [next(order) for order in orders]
    while any(following):
        for stage, order in enumerate(orders):
            now = spans[stage][-1][2] if spans[stage] else 0.0
            while action := following[stage]:
                way, place, number = action
                sources = needed(*action)
                if not all(source in done for source in sources):
                    break
                is_hop = way == "backward" or (way == "forward" and place > 0)
                wait = work.hop if is_hop else 0.0
                begin = max([now, *(done[source] + wait for source in sources)])
                following[stage] = next(order, None)
                if way != RETURN:
                    name, length = _name_and_time(work, stage, *action)
                    now = begin + length
                    spans[stage].append((name, begin, now))
                done[action] = now
    return spans


def _name_and_time(work: Work, stage: int, way: str, place: int, number: int) -> tuple[str, float]:
    if way == ENCODE:
        return "encoder forward", work.encoding("forward", number)
    if way == ENCODER_BACKWARD:
        return "encoder backward", work.encoding("backward", number)
    return f"{work.stages[stage].module} {way}", work.operation(way, place)


def _actions(
    stage: int, size: int, microbatches: int, vpp: int, pieces: Pieces | None
) -> Iterator[_Action]:
    """Yield all operations of a stage, in order."""
    order = order_of_stage(stage, size, microbatches, vpp)
    operations = [(way, chunk * size + stage, number) for way, chunk, number in order]
    for place, before in enumerate(pieces[stage] if pieces else [()] * len(operations)):
        for kind, number in before:
            yield ENCODER_BACKWARD if kind == BACKWARD_PIECE else kind, stage, number
        yield from operations[place : place + 1]
