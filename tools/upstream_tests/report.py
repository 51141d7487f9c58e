# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Report of the comparisons, in Markdown."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from upstream_tests.comparison import Comparison
from upstream_tests.outcomes import Outcome, file_of, passing
from upstream_tests.selection import TESTS

Worlds = dict[int, Comparison]
NOT_PASSED = ("failed", "hung", "skipped")
HEADS = ["world", "pristine", "applied", "lost", "gained", *NOT_PASSED]


def summary(release: str, worlds: Worlds, excluded: dict[str, str]) -> list[str]:
    """Return all lines of the report; `excluded` are tests that do not run, with the reasons."""
    lines = [f"Upstream's tests of {release}", "", *counts_table(worlds)]
    wavering = [f"[{world}] {test}" for world, found in worlds.items() for test in found.wavering]
    for title, tests in (
        ("Pass in no world, by what they say", list(_passing_nowhere(worlds))),
        ("Not run", [f"{test}: {why}" for test, why in excluded.items()]),
        ("Passed on the pristine tree, then once not on the applied one", wavering),
        ("LOST: passes on the pristine tree, not on the applied one", list(_lost(worlds))),
    ):
        lines += ["", f"{title}:", *(f"- {test}" for test in tests)] if tests else []
    return lines


def counts_table(worlds: Worlds) -> list[str]:
    """Return the table of counts, with a row for each world."""
    rows = []
    for world, found in worlds.items():
        before, after = passing(found.pristine), passing(found.applied)
        neither = found.pristine.keys() - before - after
        counts = Counter(found.pristine[test].outcome for test in neither)
        row = [world, len(before), len(after), len(found.lost), len(after - before)]
        rows.append([*row, *(counts[column] for column in NOT_PASSED)])
    rule = ["-" * (len(head) - 1) + ":" for head in HEADS]
    lines = [HEADS, rule, *rows]
    padded = ([str(c).rjust(len(h)) for c, h in zip(line, HEADS, strict=True)] for line in lines)
    return [f"| {' | '.join(line)} |" for line in padded]


def _passing_nowhere(worlds: Worlds) -> Iterator[str]:
    """Yield what tests say in the largest world that they fail in, with their numbers by file."""
    outcomes: dict[str, Outcome] = {}
    passed: set[str] = set()
    for found in worlds.values():
        outcomes |= found.pristine
        passed |= passing(found.pristine) | passing(found.applied)
    files_of: dict[str, Counter[str]] = defaultdict(Counter)
    for test in sorted(outcomes.keys() - passed):
        says = f"{outcomes[test].outcome}: {outcomes[test].reason[:160]}"
        files_of[says][file_of(test).removeprefix(f"{TESTS}/")] += 1
    for says, files in sorted(files_of.items()):
        yield f"{says}: {', '.join(f'{file} {n}' for file, n in files.items())}"


def _lost(worlds: Worlds) -> Iterator[str]:
    for world, found in worlds.items():
        for test in found.lost:
            now = found.applied.get(test, Outcome("gone"))
            yield f"[{world}] {test}: {now.outcome} {now.reason[:160]}"
