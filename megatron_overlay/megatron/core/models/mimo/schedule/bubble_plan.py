# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan which piece of the encoders' work each rank does before which operation of its pipeline.

Plans are plain data, the same on every rank, simulated from Megatron's own order of operations.
Every stage does three pieces for macro-batch k: ``encode`` runs the encoders and starts sending
their rows over the bridge to the first stage; ``return`` starts sending the gradients back, once
the first stage has them all; ``backward`` waits for these gradients and runs the encoders'
backward.

A plan cannot deadlock. Everything a rank waits for (its pipeline neighbours' tensors, rows,
gradients) was started by other ranks at an earlier simulated time; every rank does its part in the
order of that time, and does not wait for what it starts itself. Each kind of piece comes in the
order of the macro-batches on every rank, and each direction of the bridge has its own process
group, so all ranks start a group's collectives in one order.
"""

from __future__ import annotations

import functools
import heapq
import math
from typing import NamedTuple

from megatron.core.pipeline_parallel.stage_order import order_of_stage

ENCODE, RETURN, BACKWARD = "encode", "return", "backward"

LEADS, FITS = (0, 2), (0.0, 0.05, 0.5, 1.0)
"""Values that :func:`bubble_plan` tries.

A lead is the least number of operations by which encoding precedes the operation that needs it on
the first stage. A fit is the share of a piece that a gap must hold, where the end of the gap is
known, for the piece to start in it; 0.05 rules out gaps that are only rounding errors.
"""


class Piece(NamedTuple):
    """One kind of work for one macro-batch."""

    kind: str
    macro_batch: int


StagePieces = tuple[tuple[Piece, ...], ...]
"""Pieces before each operation of a stage, and last those after its last operation."""


class Costs(NamedTuple):
    """Times in one common unit; they decide where pieces go, never whether a plan is correct.

    Args:
        forward, backward: time of one microbatch in one virtual stage.
        encode, encoder_backward: time of one microbatch's images, spread over all ranks.
    """

    forward: float
    backward: float
    encode: float
    encoder_backward: float

    @classmethod
    def of_share(cls, share: float, vpp: int = 1) -> Costs:
        """Return costs by the encoders' share of the work; a backward costs two forwards.

        Args:
            share: the encoders' share of the time of a step in which no rank waits.
        """
        encode = share / (1 - share)
        return cls(1 / vpp, 2 / vpp, encode, 2 * encode)


EQUAL_SHARES = Costs.of_share(0.5)
"""Costs of encoders with as much work as the language model, without virtual stages."""


class BubblePlan(NamedTuple):
    """Placement of all pieces in one step.

    Args:
        before: pieces of each stage.
        seconds: simulated duration of the step, in the unit of the costs.
    """

    before: tuple[StagePieces, ...]
    seconds: float


def most_kept(stages: int, macro_batch: int) -> int:
    """Return the most macro-batches whose encoder activations a rank keeps.

    With costs other than :data:`EQUAL_SHARES` a rank may keep one more.
    """
    return math.ceil(2 * stages / macro_batch) + 1


@functools.cache
def bubble_plan(
    stages: int,
    microbatches: int,
    macro_batch: int,
    vpp: int = 1,
    trained: bool = True,
    costs: Costs = EQUAL_SHARES,
    group: int | None = None,
) -> BubblePlan:
    """Return the plan with the shortest simulated step of all :data:`LEADS` and :data:`FITS`.

    A rank keeps activations of :func:`most_kept` macro-batches, however many a step has: as many as
    the pipeline has in flight, and as many again that are encoded ahead.

    Args:
        stages: pipeline stages, two or more.
        trained: whether any encoder takes gradients; if none does, ``encode`` is the only piece.
        group: as in :func:`order_of_stage`.
    """
    orders = [order_of_stage(stage, stages, microbatches, vpp, group) for stage in range(stages)]
    tried = []
    for lead in LEADS:
        for fit in FITS:
            simulation = _Simulation(orders, microbatches, macro_batch, vpp, trained, costs)
            tried.append(simulation.run(lead, fit))
    return min(tried, key=lambda plan: plan.seconds)


def pieces_around_the_pipeline(operations: int, macro_batches: int, trained: bool) -> StagePieces:
    """Return a stage's pieces if none runs between pipeline operations.

    Args:
        operations: number of pipeline operations of the stage.
        trained: as in :func:`bubble_plan`.
    """

    def all_of(*kinds: str) -> tuple[Piece, ...]:
        return tuple(Piece(kind, k) for kind in kinds for k in range(macro_batches))

    last = all_of(RETURN, BACKWARD) if trained else ()
    return all_of(ENCODE), *[()] * (operations - 1), last


def pieces_in_turn(microbatches: int, macro_batch: int, trained: bool) -> StagePieces:
    """Return the only stage's pieces without a pipeline.

    A macro-batch is encoded before its first forward, and goes back after its last backward.
    """
    before = [[] for _ in range(2 * microbatches + 1)]
    for k, first in enumerate(range(0, microbatches, macro_batch)):
        before[2 * first].append(Piece(ENCODE, k))
        if trained:
            end = min(first + macro_batch, microbatches)
            before[2 * end] += [Piece(RETURN, k), Piece(BACKWARD, k)]
    return tuple(map(tuple, before))


class _Simulation:
    """Simulation of a step in which each stage fills its gaps in the order it meets them."""

    def __init__(
        self,
        orders: list[list[tuple[str, int, int]]],
        microbatches: int,
        macro_batch: int,
        vpp: int,
        trained: bool,
        costs: Costs,
    ) -> None:
        self.orders, self.size, self.vpp, self.costs = orders, len(orders), vpp, costs
        self.macro_batch, self.microbatches, self.trained = macro_batch, microbatches, trained
        self.count = -(-microbatches // macro_batch)
        self.most_kept = most_kept(self.size, macro_batch)
        first = {(way, chunk, number): i for i, (way, chunk, number) in enumerate(orders[0])}
        self.needed_at = [first["forward", 0, k * macro_batch] for k in range(self.count)]
        stages = range(self.size)
        self.now = [0.0 for _ in stages]
        self.place = [0 for _ in stages]
        self.next = [dict.fromkeys((ENCODE, RETURN, BACKWARD), 0) for _ in stages]
        self.done: dict[tuple[str, int, int], float] = {}
        self.before = [[[] for _ in range(len(order) + 1)] for order in orders]

    def run(self, lead: int, fit: float) -> BubblePlan:
        events = [(0.0, stage) for stage in range(self.size)]
        while events:
            time, stage = heapq.heappop(events)
            if time < self.now[stage]:
                continue  # the stage is busy; another event follows when it is free
            if self._act(stage, time, lead, fit):
                for other in range(self.size):
                    heapq.heappush(events, (max(self.now[other], self.now[stage]), other))
                heapq.heappush(events, (self.now[stage], stage))
            elif self.place[stage] < len(self.orders[stage]):
                if time < (arrival := self._arrival(stage)) < math.inf:
                    heapq.heappush(events, (arrival, stage))
        before = tuple(tuple(map(tuple, places)) for places in self.before)
        return BubblePlan(before, max(self.now))

    def _act(self, stage: int, time: float, lead: int, fit: float) -> bool:
        """Start one operation or piece on a free stage; False if it can only wait."""
        order, place = self.orders[stage], self.place[stage]
        if place == len(order):
            return self._begin_return(stage, time) or self._backward(stage, time, math.inf, 0)
        way, chunk, number = order[place]
        virtual = chunk * self.size + stage
        if way == "backward" and virtual == self.size * self.vpp - 1:
            return self._operate(stage, time)  # its forward came just before: no wait to fill
        if self._begin_return(stage, time):
            return True
        following = self.next[stage][ENCODE]
        if following < self.count and (
            (way == "forward" and following * self.macro_batch <= number)
            or place >= self.needed_at[following] - lead
        ):
            is_full = self._kept(stage) >= self.most_kept
            return is_full and self._backward(stage, time, math.inf, 0) or self._encode(stage, time)
        gap = self._arrival(stage) - time
        if gap <= 0:
            return self._operate(stage, time)
        if self._kept(stage) < self.most_kept and following < self.count:
            if gap >= fit * self._length(following) * self.costs.encode:
                return self._encode(stage, time)
        return self._backward(stage, time, gap, fit)

    def _arrival(self, stage: int) -> float:
        """Return the time at which the next operation's inputs arrive; ``inf`` if not known yet."""
        way, chunk, number = self.orders[stage][self.place[stage]]
        virtual = chunk * self.size + stage
        if way == "forward" and virtual == 0:
            return self._done_by_all(ENCODE, number // self.macro_batch)
        if way == "backward" and virtual == self.size * self.vpp - 1:
            return self.done["forward", virtual, number]
        neighbour = virtual - 1 if way == "forward" else virtual + 1
        return self.done.get((way, neighbour, number), math.inf)

    def _operate(self, stage: int, time: float) -> bool:
        way, chunk, number = self.orders[stage][self.place[stage]]
        virtual = chunk * self.size + stage
        length = self.costs.forward if way == "forward" else self.costs.backward
        self.now[stage] = time + length
        self.done[way, virtual, number] = self.now[stage]
        self.place[stage] += 1
        return True

    def _encode(self, stage: int, time: float) -> bool:
        k = self._take(stage, ENCODE)
        self.now[stage] = time + self._length(k) * self.costs.encode
        self.done[ENCODE, stage, k] = self.now[stage]
        return True

    def _begin_return(self, stage: int, time: float) -> bool:
        following = self.next[stage][RETURN]
        last = self._end(following) - 1
        is_whole = self.done.get(("backward", 0, last), math.inf) <= time
        if not self.trained or following == self.count or not is_whole:
            return False
        self.now[stage] = time  # it may have waited for the others
        self.done[RETURN, stage, self._take(stage, RETURN)] = time
        return True

    def _backward(self, stage: int, time: float, gap: float, fit: float) -> bool:
        following = self.next[stage][BACKWARD]
        if following == self.count or self._done_by_all(RETURN, following) > time:
            return False
        length = self._length(following) * self.costs.encoder_backward
        if gap < fit * length:
            return False
        self._take(stage, BACKWARD)
        self.now[stage] = time + length
        return True

    def _done_by_all(self, kind: str, k: int) -> float:
        return max(self.done.get((kind, stage, k), math.inf) for stage in range(self.size))

    def _take(self, stage: int, kind: str) -> int:
        k = self.next[stage][kind]
        self.next[stage][kind] += 1
        self.before[stage][self.place[stage]].append(Piece(kind, k))
        return k

    def _kept(self, stage: int) -> int:
        """Count the macro-batches whose activations (or rows, if untrained) the stage holds."""
        freed = self.next[stage][BACKWARD]
        if not self.trained:
            steps = self.orders[stage][: self.place[stage]]
            freed = sum(way == "forward" and chunk == 0 for way, chunk, _ in steps)
            freed //= self.macro_batch
        return self.next[stage][ENCODE] - freed

    def _end(self, k: int) -> int:
        return min((k + 1) * self.macro_batch, self.microbatches)

    def _length(self, k: int) -> int:
        return self._end(k) - k * self.macro_batch
