# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Timelines of a step, simulated from the shares of encoder and language model, not measured.

The unit of time is a step in which no rank waits: encoder E plus language model L, E + L = 1. A
backward takes twice as long as a forward, and stages have equal work, so that a step of colocated
modules takes E + L·(1 + (p − 1)/(m·v)) with p stages, m microbatches and v virtual stages. With the
encoder in the bubbles, the timeline is that of the plan by which training runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from examples.mimo.common.layout import Layouts
from megatron.core.models.mimo.schedule.bubble_plan import (
    BACKWARD,
    ENCODE,
    RETURN,
    BubblePlan,
    Costs,
    Piece,
    bubble_plan,
)
from megatron.core.pipeline_parallel.stage_order import order_of_stage

FORWARD = 1 / 3
"""Share of the forward in the time of forward and backward."""

Span = tuple[str, float, float]
"""A span of time: phase, begin and end."""


@dataclass(frozen=True)
class Timeline:
    """The timeline of one step.

    Attributes:
        stages: spans of a rank of each pipeline stage, in order.
        names: names of the stages.
    """

    stages: list[list[Span]]
    names: list[str]

    @property
    def total(self) -> float:
        """Time of the step."""
        return max(spans[-1][2] for spans in self.stages)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that they spend waiting."""
        return 1 - 1 / self.total


def timeline(
    layouts: Layouts, encoder_share: float, in_bubbles: bool = False, macro_batch: int = 1
) -> Timeline:
    """Simulate one step.

    Args:
        encoder_share: E, the encoder's share of a step in which no rank waits.
        in_bubbles: whether the colocated encoder works in the pipeline's bubbles instead of three
            phases.
        macro_batch: microbatches that are encoded at once in the bubbles.
    """
    language, number = layouts.language, layouts.num_microbatches
    share = {"encoder": encoder_share, "language": 1 - encoder_share}
    names = [f"stage {stage}" for stage in range(language.pp)]
    if layouts.non_colocated:
        world = layouts.encoder.size + language.size
        parts = {"encoder": layouts.encoder, "language": language}
        modules = [name for name, part in parts.items() for _ in range(part.pp)]
        costs = {name: share[name] * world / part.size for name, part in parts.items()}
        stages = pipeline(modules, costs, number)
        return Timeline(stages, [f"encoder {s}" for s in range(layouts.encoder.pp)] + names)
    if language.pp == 1:
        return Timeline([_without_pipeline(share, number)], ["all ranks"])
    if in_bubbles:
        costs = Costs.of_share(encoder_share, language.vpp)
        plan = bubble_plan(language.pp, number, macro_batch, language.vpp, costs=costs)
        return Timeline(_spans(plan, share["language"] / (3 * number)), names)
    begin = FORWARD * share["encoder"]
    stages = pipeline(["language"] * language.pp, share, number, language.vpp)
    end = begin + max(spans[-1][2] for spans in stages)
    stages = [
        [
            ("encoder forward", 0.0, begin),
            *((phase, begin + start, begin + stop) for phase, start, stop in spans),
            ("encoder backward", end, end + (1 - FORWARD) * share["encoder"]),
        ]
        for spans in stages
    ]
    return Timeline(stages, names)


def _spans(plan: BubblePlan, unit: float) -> list[list[Span]]:
    """Convert the spans of a plan, whose unit of time is ``unit`` here."""
    return [
        [(span.name, unit * span.begin, unit * span.end) for span in spans] for spans in plan.spans
    ]


def _without_pipeline(share: dict[str, float], microbatches: int) -> list[Span]:
    spans: list[Span] = []
    now = 0.0
    for _ in range(microbatches):
        for way, order in (("forward", ("encoder", "language")), ("backward", None)):
            for module in order or ("language", "encoder"):
                part = FORWARD if way == "forward" else 1 - FORWARD
                spans.append((f"{module} {way}", now, now + part * share[module] / microbatches))
                now = spans[-1][2]
    return spans


def pipeline(
    modules: list[str], costs: dict[str, float], microbatches: int, vpp: int = 1
) -> list[list[Span]]:
    """Simulate 1F1B with stages of equal work in each module.

    Args:
        modules: module of each stage.
        costs: time that a rank of each module takes for all microbatches, forward and backward.
        vpp: virtual stages of each stage.
    """

    def seconds(way: str, virtual: int) -> float:
        part = FORWARD if way == "forward" else 1 - FORWARD
        return part * costs[modules[virtual % len(modules)]] / (microbatches * vpp)

    return simulate(modules, seconds, microbatches, vpp)


class Encoders(NamedTuple):
    """The encoder's work in colocated stages, as a plan of bubbles places it.

    Args:
        before: pieces of encoder work before each operation of each stage, as in ``BubblePlan``.
        macro_batch: number of microbatches of a macro-batch.
        seconds: returns the time of ``encode`` or ``backward`` of a macro-batch, by its number.
    """

    before: tuple[tuple[tuple[Piece, ...], ...], ...]
    macro_batch: int
    seconds: Callable[[str, int], float]


_Action = tuple[str, int, int]
"""An operation, its virtual stage and microbatch; or the encoder's, a stage and macro-batch."""
_ENCODE, _RETURN, _BACKWARD = (f"encoder {kind}" for kind in (ENCODE, RETURN, BACKWARD))


def simulate(
    modules: list[str],
    seconds: Callable[[str, int], float],
    microbatches: int,
    vpp: int = 1,
    hop: float = 0.0,
    encoders: Encoders | None = None,
) -> list[list[Span]]:
    """Simulate 1F1B, interleaved with virtual stages, in Megatron's order of microbatches.

    Args:
        modules: module of each stage.
        seconds: returns the time of a microbatch's ``forward`` or ``backward`` in a virtual stage.
        vpp: virtual stages of each stage.
        hop: seconds that a tensor takes to the next stage.
        encoders: the encoder's work in the bubbles, if any.
    """
    size = len(modules)
    actions = [_actions(stage, size, microbatches, vpp, encoders) for stage in range(size)]

    def needed(way: str, place: int, number: int) -> list[_Action]:
        if way == _BACKWARD:
            return [(_RETURN, stage, number) for stage in range(size)]
        if encoders and (way, place) == ("forward", 0):
            return [(_ENCODE, stage, number // encoders.macro_batch) for stage in range(size)]
        source = place - 1 if way == "forward" else place + 1
        is_sent = way in ("forward", "backward") and source not in (-1, size * vpp)
        return [(way, source, number)] if is_sent else []

    done: dict[_Action, float] = {}
    stages: list[list[Span]] = [[] for _ in modules]
    places = [0] * size
    while any(place < len(order) for place, order in zip(places, actions, strict=True)):
        for stage, (module, order) in enumerate(zip(modules, actions, strict=True)):
            now = stages[stage][-1][2] if stages[stage] else 0.0
            while places[stage] < len(order):
                way, place, number = action = order[places[stage]]
                sources = needed(*action)
                if not all(source in done for source in sources):
                    break
                wait = 0.0 if way == _BACKWARD or (way, place) == ("forward", 0) else hop
                begin = max([now, *(done[source] + wait for source in sources)])
                places[stage] += 1
                if way == _RETURN:
                    done[action] = now
                    continue
                if way in (_ENCODE, _BACKWARD):
                    now = begin + encoders.seconds(way.removeprefix("encoder "), number)
                    name = "encoder forward" if way == _ENCODE else _BACKWARD
                else:
                    now = begin + seconds(way, place)
                    name = f"{module} {way}"
                done[action] = now
                stages[stage].append((name, begin, now))
    return stages


def _actions(
    stage: int, size: int, microbatches: int, vpp: int, encoders: Encoders | None
) -> list[_Action]:
    """Return all operations of a stage, in order."""
    order = order_of_stage(stage, size, microbatches, vpp)
    operations = [(way, chunk * size + stage, number) for way, chunk, number in order]
    if encoders is None:
        return operations
    found: list[_Action] = []
    for place, pieces in enumerate(encoders.before[stage]):
        found += [(f"encoder {kind}", stage, number) for kind, number in pieces]
        found += operations[place : place + 1]
    return found
