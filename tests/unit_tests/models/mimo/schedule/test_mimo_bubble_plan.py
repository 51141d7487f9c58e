# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of encoder work in bubbles, run by ranks that wait for each other; no processes."""

import itertools
import random

import pytest

from megatron.core.models.mimo.schedule.bubble_plan import (
    BACKWARD,
    ENCODE,
    EQUAL_SHARES,
    RETURN,
    BubblePlan,
    Costs,
    bubble_plan,
    most_kept,
    pieces_in_turn,
)
from megatron.core.pipeline_parallel.stage_order import order_of_stage

CASES = 1000


def draw_case(seed: int) -> dict[str, object]:
    """Arguments of a plan; costs over four orders of magnitude."""
    rng = random.Random(seed)
    stages, vpp = rng.randint(2, 5), rng.choice([1, 1, 2, 3])
    microbatches = rng.randint(1, 12) if vpp == 1 else stages * rng.randint(1, 3)
    return {
        "stages": stages,
        "microbatches": microbatches,
        "macro_batch": rng.randint(1, microbatches),
        "vpp": vpp,
        "trained": rng.random() < 0.8,
        "costs": Costs(*(10 ** rng.uniform(-2, 2) for _ in range(4))),
    }


class World:
    """Ranks, one a stage, that each do a list of actions in order, and wait for others' actions.

    A wait ends once the data is sent, or once all ranks of the bridge have begun the exchange.

    Args:
        case: arguments of the plan.
        before: the plan's pieces.
    """

    def __init__(self, case: dict, before: list[list[list[tuple[str, int]]]]) -> None:
        self.size, self.vpp = case["stages"], case["vpp"]
        self.macro_batch, self.count = case["macro_batch"], case["microbatches"]
        self.lists = [self._actions(stage, before[stage]) for stage in range(self.size)]
        self.places = [0] * self.size
        self.passed: list[set] = [set() for _ in range(self.size)]

    def _actions(self, stage: int, before: list[list[tuple[str, int]]]) -> list[tuple]:
        order = order_of_stage(stage, self.size, self.count, self.vpp)
        found, last = [], self.size * self.vpp - 1
        for pieces, (way, chunk, number) in zip(before, order, strict=False):
            virtual = chunk * self.size + stage
            source = virtual - 1 if way == "forward" else virtual + 1
            found += pieces
            if source not in (-1, last + 1):
                found.append(("wait", (way, source, number)))
            if way == "forward" and virtual == 0:
                found.append(("rows", number // self.macro_batch))
            found.append(("operate", (way, virtual, number)))
        return found + list(before[-1])

    def run(self, seed: int = 0) -> None:
        """Let the ranks act in a random order until all are done.

        Raises:
            AssertionError: no rank can go on, or one does a thing too early.
        """
        rng = random.Random(seed)
        while left := [r for r in range(self.size) if self.places[r] < len(self.lists[r])]:
            able = [stage for stage in left if self._may(stage, self._current(stage))]
            assert able, f"all wait for each other: {[self._current(stage) for stage in left]}"
            stage = rng.choice(able)
            action = self._current(stage)
            self._check(stage, action)
            self.passed[stage].add(action)
            self.places[stage] += 1

    def _current(self, stage: int) -> tuple:
        return self.lists[stage][self.places[stage]]

    def _may(self, stage: int, action: tuple) -> bool:
        kind, what = action
        if kind == "wait":
            return ("operate", what) in self.passed[what[1] % self.size]
        if kind == "rows":
            return all((ENCODE, what) in passed for passed in self.passed)
        if kind == BACKWARD:
            return all((RETURN, what) in passed for passed in self.passed)
        return True

    def _check(self, stage: int, action: tuple) -> None:
        kind, what = action
        passed = self.passed[stage]
        if kind == "operate" and what[0] == "forward":
            assert (ENCODE, what[2] // self.macro_batch) in passed, "no microbatch was drawn"
        if kind == RETURN and stage == 0:
            numbers = range(what * self.macro_batch, (what + 1) * self.macro_batch)
            whole = [("operate", ("backward", 0, n)) in passed for n in numbers if n < self.count]
            assert all(whole), f"{action}: gradients are not whole"


class TestEveryPlan:
    @pytest.mark.parametrize("part", range(4))
    def test_no_rank_waits_for_itself(self, part):
        """Rows are there before the first stage needs them, and gradients are whole."""
        for seed in range(part, CASES, 4):
            case = draw_case(seed)
            World(case, bubble_plan(**case).before).run(seed)

    def test_each_piece_once_on_each_stage_in_the_order_of_macro_batches(self):
        for seed in range(0, CASES, 5):
            case = draw_case(seed)
            count = -(-case["microbatches"] // case["macro_batch"])
            for stage in bubble_plan(**case).before:
                pieces = [piece for place in stage for piece in place]
                for kind in (ENCODE, RETURN, BACKWARD):
                    expected = list(range(count)) if case["trained"] or kind == ENCODE else []
                    assert [p.macro_batch for p in pieces if p.kind == kind] == expected

    def test_the_last_stage_has_no_piece_between_a_microbatchs_forward_and_backward(self):
        """The stage waits for nothing there, and nothing tells when the backward begins."""
        for seed in range(0, CASES, 5):
            case = draw_case(seed)
            last = case["stages"] - 1
            order = order_of_stage(last, case["stages"], case["microbatches"], case["vpp"])
            for place, (way, chunk, _) in enumerate(order):
                if way == "backward" and chunk == case["vpp"] - 1:
                    assert not bubble_plan(**case).before[last][place]


def test_without_a_pipeline_a_macro_batch_goes_back_before_the_next_is_encoded():
    none, back = (), [[(RETURN, k), (BACKWARD, k)] for k in range(2)]
    turns = ((ENCODE, 0),), none, none, none, (*back[0], (ENCODE, 1)), none, (*back[1],)
    assert pieces_in_turn(3, 2, trained=True) == turns
    assert sum(pieces_in_turn(3, 2, trained=False), ()) == ((ENCODE, 0), (ENCODE, 1))


def kept_by_stage(plan: BubblePlan) -> list[int]:
    """Largest number of macro-batches whose activations each stage keeps."""
    found = []
    for stage in plan.before:
        pieces = [piece for place in stage for piece in place]
        changes = [{ENCODE: 1, RETURN: 0, BACKWARD: -1}[piece.kind] for piece in pieces]
        found.append(max(itertools.accumulate(changes)))
    return found


@pytest.mark.parametrize(("stages", "vpp"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("macro_batch", [1, 2])
@pytest.mark.parametrize("costs", [EQUAL_SHARES, Costs(8, 0.02, 3, 3)], ids=["equal", "odd"])
def test_what_is_kept_does_not_grow_with_the_batch(stages, vpp, macro_batch, costs):
    for microbatches in (16, 64, 256):
        plan = bubble_plan(stages, microbatches, macro_batch, vpp, costs=costs)
        most = most_kept(stages, macro_batch) + (costs != EQUAL_SHARES)
        assert max(kept_by_stage(plan)) <= most


def three_phases(stages: int, microbatches: int, vpp: int, costs: Costs) -> float:
    """E + L·(1 + (p − 1)/(m·v))."""
    encoder = microbatches * (costs.encode + costs.encoder_backward)
    language = microbatches * vpp * (costs.forward + costs.backward)
    return encoder + language * (1 + (stages - 1) / (microbatches * vpp))


class TestTime:
    @pytest.mark.parametrize(
        ("stages", "microbatches", "share", "most"),
        [
            (2, 4, 0.3, 0.92),
            (2, 4, 0.5, 0.92),
            (4, 8, 0.3, 0.88),
            (4, 8, 0.5, 0.85),
            (4, 8, 0.49994, 0.85),  # nearly equal times leave gaps of almost nothing
        ],
    )
    def test_bubbles_are_filled(self, stages, microbatches, share, most):
        costs = Costs.of_share(share)
        planned = bubble_plan(stages, microbatches, 1, costs=costs).seconds
        assert planned <= most * three_phases(stages, microbatches, 1, costs)

    def test_no_plan_beats_the_bound(self):
        for seed in range(0, CASES, 3):
            case = draw_case(seed)
            stages, vpp, costs = case["stages"], case["vpp"], case["costs"]
            planned = bubble_plan(**case | {"trained": True}).seconds
            language = case["microbatches"] * vpp * (costs.forward + costs.backward)
            encoder = case["microbatches"] * (costs.encode + costs.encoder_backward)
            wait = (stages - 1) * (costs.forward + costs.backward)
            assert planned >= (language + max(encoder, wait)) * (1 - 1e-9)
