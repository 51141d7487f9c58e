# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Report of the comparisons, in Markdown."""

from collections import Counter, defaultdict

from upstream_tests.comparison import Comparison
from upstream_tests.outcomes import Outcome, file_of, passing
from upstream_tests.selection import TESTS, Selection

Worlds = dict[int, Comparison]
NOT_PASSED = ("ranks", "gpu", "package", "failed", "hung", "skipped")
HEADS = ["world", "pristine", "applied", "lost", "gained", *NOT_PASSED]


def summary(release: str, worlds: Worlds, selection: Selection) -> list[str]:
    """Return all lines of the report."""
    lines = [f"Upstream's tests of {release}", "", *counts_table(worlds, selection)]
    for title, tests in (
        ("Cannot run without a GPU", _unable(worlds, selection, "gpu")),
        ("Cannot run without a package", _unable(worlds, selection, "package")),
        ("Not run", [f"{test}: {why}" for test, why in selection.excluded.items()]),
        ("Fails on both trees, in a world where it has its ranks", _failing(worlds, selection)),
        ("Passed on the pristine tree, then once not on the applied one", _wavering(worlds)),
        ("LOST: passes on the pristine tree, not on the applied one", _lost(worlds)),
    ):
        lines += ["", f"{title}:", *(f"- {test}" for test in tests)] if tests else []
    return lines


def sort_of(found: Outcome, selection: Selection) -> str:
    """Return the column of a test that does not pass: its need if known, else its outcome."""
    if found.outcome in ("hung", "crashed"):
        return "hung"
    need = selection.need(found.reason)
    return need.kind if need else found.outcome


def counts_table(worlds: Worlds, selection: Selection) -> list[str]:
    """Return the table of counts, with a row for each world."""
    rows = []
    for world, found in worlds.items():
        before, after = passing(found.pristine), passing(found.applied)
        counts = Counter(sort_of(found.pristine[test], selection) for test in _neither(found))
        row = [world, len(before), len(after), len(found.lost), len(after - before)]
        rows.append([*row, *(counts[column] for column in NOT_PASSED)])
    rule = ["-" * (len(head) - 1) + ":" for head in HEADS]
    lines = [HEADS, rule, *rows]
    padded = ([str(c).rjust(len(h)) for c, h in zip(line, HEADS, strict=True)] for line in lines)
    return [f"| {' | '.join(line)} |" for line in padded]


def _neither(found: Comparison) -> list[str]:
    """Return the tests of the pristine tree that pass on neither tree."""
    return sorted(found.pristine.keys() - passing(found.pristine) - passing(found.applied))


def _unable(worlds: Worlds, selection: Selection, kind: str) -> list[str]:
    """Return the needs of a kind of tests that pass in no world, with counts by file."""
    passed = set().union(*(passing(found.pristine) for found in worlds.values()))
    tests_of: dict[str, set[str]] = defaultdict(set)
    for found in worlds.values():
        for test in set(_neither(found)) - passed:
            if sort_of(found.pristine[test], selection) == kind:
                tests_of[selection.need(found.pristine[test].reason).name].add(test)
    lines = []
    for need, tests in sorted(tests_of.items()):
        files = Counter(file_of(test).removeprefix(f"{TESTS}/") for test in sorted(tests))
        lines.append(f"{need}: {', '.join(f'{file} {n}' for file, n in files.items())}")
    return lines


def _failing(worlds: Worlds, selection: Selection) -> list[str]:
    return [
        f"[{world}] {test}: {found.pristine[test].reason[:160]}"
        for world, found in worlds.items()
        for test in _neither(found)
        if sort_of(found.pristine[test], selection) in ("failed", "hung")
    ]


def _wavering(worlds: Worlds) -> list[str]:
    return [f"[{world}] {test}" for world, found in worlds.items() for test in found.wavering]


def _lost(worlds: Worlds) -> list[str]:
    lines = []
    for world, found in worlds.items():
        for test in found.lost:
            now = found.applied.get(test, Outcome("gone"))
            lines.append(f"[{world}] {test}: {now.outcome} {now.reason[:160]}")
    return lines
