# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The timeline of a step, from the shares of encoder and language model; nothing is measured.

Times are in units of a step in which no rank waits, on all ranks: encoder E, language model L,
E + L = 1. A backward takes twice as long as a forward, and stages have equal work, so that a step
of colocated modules takes E + L·(1 + (p − 1)/(m·v)): p stages, m microbatches, v virtual stages. In
bubbles it takes what the plan that training runs by says of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from examples.mimo.nemotron_vlm.layout import Layouts
from megatron.core.models.mimo.bubble_plan import (
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
"""Share of the forward in forward and backward."""

Span = tuple[str, float, float]
"""Phase, begin and end."""


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        stages: what a rank of each pipeline stage does, in order.
        names: of the stages.
    """

    stages: list[list[Span]]
    names: list[str]

    @property
    def total(self) -> float:
        """Time of the step."""
        return max(spans[-1][2] for spans in self.stages)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - 1 / self.total


def timeline(
    layouts: Layouts, encoder_share: float, in_bubbles: bool = False, macro_batch: int = 1
) -> Timeline:
    """Simulate one step.

    Args:
        encoder_share: E, of a step in which no rank waits.
        in_bubbles: whether colocated encoders work in the bubbles of a pipeline, else in phases.
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
    """What each stage does when, in units of which the plan's has ``unit``."""
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
    """1F1B of stages with equal work.

    Args:
        modules: of each stage.
        costs: time of a module's forwards and backwards of all microbatches, on one of its ranks.
        vpp: virtual stages of each stage.
    """

    def seconds(way: str, virtual: int) -> float:
        part = FORWARD if way == "forward" else 1 - FORWARD
        return part * costs[modules[virtual % len(modules)]] / (microbatches * vpp)

    return simulate(modules, seconds, microbatches, vpp)


class Encoders(NamedTuple):
    """The encoders' part of colocated stages, where a plan of bubbles puts it.

    Args:
        before: pieces before each operation of each stage, as ``BubblePlan`` has them.
        macro_batch: microbatches of a macro-batch.
        seconds: of one macro-batch's ``encode`` or ``backward``, by its number.
    """

    before: tuple[tuple[tuple[Piece, ...], ...], ...]
    macro_batch: int
    seconds: Callable[[str, int], float]


_Action = tuple[str, int, int]
"""An operation, its virtual stage and microbatch; or the encoders', a stage and macro-batch."""
_ENCODE, _RETURN, _BACKWARD = (f"encoder {kind}" for kind in (ENCODE, RETURN, BACKWARD))


def simulate(
    modules: list[str],
    seconds: Callable[[str, int], float],
    microbatches: int,
    vpp: int = 1,
    hop: float = 0.0,
    encoders: Encoders | None = None,
) -> list[list[Span]]:
    """1F1B, interleaved with virtual stages, in the order in which Megatron runs microbatches.

    Args:
        modules: of each stage.
        seconds: of one microbatch's ``forward`` or ``backward`` in a virtual stage of the pipeline.
        vpp: virtual stages of each stage.
        hop: seconds that a tensor takes to the next stage.
        encoders: that work in the stages' bubbles.
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
    """All that a stage does, in order."""
    order = order_of_stage(stage, size, microbatches, vpp)
    operations = [(way, chunk * size + stage, number) for way, chunk, number in order]
    if encoders is None:
        return operations
    found: list[_Action] = []
    for place, pieces in enumerate(encoders.before[stage]):
        found += [(f"encoder {kind}", stage, number) for kind, number in pieces]
        found += operations[place : place + 1]
    return found
