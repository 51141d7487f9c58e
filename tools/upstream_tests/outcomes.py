# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of tests, from the records of the ranks."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_WORST_FIRST = ("hung", "crashed", "failed", "passed", "skipped")


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
    fatal: list[str]  # tests during which ranks ended


def merge(records: Iterable[Outcome]) -> Outcome:
    """Return the outcome of a test from those of its ranks: the worst, with its reason."""
    return min(records, key=lambda record: _WORST_FIRST.index(record.outcome))


def read_records(folder: Path, world: int) -> Records:
    """Read the ranks' records, `rank0.jsonl` … in `folder`; a missing file has no records."""
    collected: list[str] | None = None
    begun: dict[str, None] = {}
    by_test: dict[str, dict[int, Outcome]] = {}
    for rank in range(world):
        path = folder / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        for record in map(json.loads, lines):
            if "collected" in record:
                collected = record["collected"]
            elif "begins" in record:
                begun[record["begins"]] = None
            else:
                found = Outcome(record["outcome"], record["reason"])
                by_test.setdefault(record["test"], {})[rank] = found
    merged = {test: merge(ranks.values()) for test, ranks in by_test.items()}
    for test in begun:
        if len(by_test.get(test, ())) < world and merged.get(test, PASSED).outcome != "hung":
            merged[test] = Outcome("crashed", "a rank ended during the test")
    fatal = [test for test in begun if merged[test].outcome in ("hung", "crashed")]
    return Records(collected, merged, fatal)


def file_of(test: str) -> str:
    """Return the file's path in a node id."""
    return test.split("::")[0]


def passing(outcomes: Outcomes) -> set[str]:
    """Return the tests that pass."""
    return {test for test, found in outcomes.items() if found.outcome == "passed"}
