# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of tests, from the records of the ranks."""

import json
from pathlib import Path
from typing import NamedTuple

_WORST_FIRST = ("hung", "failed", "passed", "skipped")


class Outcome(NamedTuple):
    """The outcome of a test in one world: passed if it passed on every rank that took part."""

    outcome: str  # one of _WORST_FIRST
    reason: str = ""


PASSED = Outcome("passed")
Outcomes = dict[str, Outcome]
"""Outcomes by node id; for a file that could not be imported, by its path."""


class Records(NamedTuple):
    """Records that the ranks of one world wrote."""

    collected: list[str] | None  # node ids in the order of running; None: collection did not end
    outcomes: Outcomes
    hung: list[str]  # tests that a rank began, and did not end


def read_records(folder: Path, world: int) -> Records:
    """Read the ranks' records, `rank0.jsonl` … in `folder`; a missing file has no records."""
    collected: list[str] | None = None
    by_test: dict[str, dict[Path, Outcome]] = {}
    begun: dict[str, None] = {}
    for path in folder.glob("rank*.jsonl"):
        for kind, value, *outcome in map(json.loads, path.read_text().splitlines()):
            if kind == "collected":
                collected = value
            elif kind == "begins":
                begun[value] = None
            else:
                by_test.setdefault(value, {})[path] = Outcome(*outcome)
    hung = [test for test in begun if len(by_test.get(test, ())) < world]
    outcomes = {
        test: min(ranks.values(), key=lambda one: _WORST_FIRST.index(one.outcome))
        for test, ranks in by_test.items()
    }
    outcomes |= dict.fromkeys(hung, Outcome("hung", "a rank did not reach its end"))
    return Records(collected, outcomes, hung)


def file_of(test: str) -> str:
    """Return the file's path in a node id."""
    return test.split("::")[0]


def passing(outcomes: Outcomes) -> set[str]:
    """Return the tests that pass."""
    return {test for test, found in outcomes.items() if found.outcome == "passed"}
