# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tables that a comparison prints, in Markdown, and the JSON that it writes."""

from collections import Counter, defaultdict

from upstream_tests.comparison import Comparison
from upstream_tests.outcomes import Outcome, Outcomes, file_of, passing
from upstream_tests.selection import TESTS, Selection

COLUMNS = ("passed", "ranks", "gpu", "package", "failed", "hung", "skipped")


def summary(found: Comparison, areas: dict[str, str], selection: Selection) -> list[str]:
    """Everything that is printed. `areas` gives each file its area."""
    lines = [f"Upstream's tests of {found.release}", "", *counts_table(found, areas, selection)]
    for kind, title in (("gpu", "Cannot run without a GPU"), ("package", "Cannot run without")):
        rows = unable_rows(found.pristine, selection, kind)
        lines += ["", f"{title}:", "", *table(["needs", "tests", "files"], rows)] if rows else []
    for title, tests in (
        (
            "Fails on the pristine tree, in a world where it has its ranks",
            _failing(found, selection),
        ),
        ("Passed on the pristine tree, then once not on the applied one", _listed(found.wavering)),
        ("LOST: passes on the pristine tree, fails on the applied one", _lost(found)),
    ):
        lines += ["", f"{title}:", *(f"- {test}" for test in tests)] if tests else []
    return lines


def sort_of(found: Outcome, selection: Selection) -> str:
    """The column of an outcome: what it lacks, if it says so, else the outcome itself."""
    if found.outcome in ("hung", "crashed"):
        return "hung"
    need = selection.need(found.reason) if found.outcome != "passed" else None
    return need.kind if need else found.outcome


def counts_table(found: Comparison, areas: dict[str, str], selection: Selection) -> list[str]:
    """One row for each area of each world, and one for all of it."""
    heads = ["world", "area", *COLUMNS]
    heads += ["applied: passed", "lost", "gained"] if found.applied else []
    rows = []
    for world, outcomes in found.pristine.items():
        for area in [*dict.fromkeys(areas.values()), None]:
            here = _of_area(outcomes, areas, area)
            counts = Counter(sort_of(outcome, selection) for outcome in here.values())
            row = [world, area or "all", *(counts[column] for column in COLUMNS)]
            if found.applied:
                after = passing(_of_area(found.applied[world], areas, area))
                lost = [test for test in found.lost[world] if area in (None, areas[file_of(test)])]
                row += [len(after), len(lost), len(after - passing(here))]
            rows.append(row)
    return table(heads, rows)


def _of_area(outcomes: Outcomes, areas: dict[str, str], area: str | None) -> Outcomes:
    return {test: o for test, o in outcomes.items() if area in (None, areas[file_of(test)])}


def unable_rows(worlds: dict[int, Outcomes], selection: Selection, kind: str) -> list[list]:
    """`[need, tests, files]` of the tests that pass in no world and lack what is of `kind`."""
    passed = set().union(*(passing(outcomes) for outcomes in worlds.values()))
    tests_of: dict[str, set[str]] = defaultdict(set)
    for outcomes in worlds.values():
        for test, outcome in outcomes.items():
            if test not in passed and sort_of(outcome, selection) == kind:
                tests_of[selection.need(outcome.reason).name].add(test)
    rows = []
    for need, tests in sorted(tests_of.items(), key=lambda item: -len(item[1])):
        files = Counter(file_of(test).removeprefix(f"{TESTS}/") for test in sorted(tests))
        rows.append([need, len(tests), ", ".join(f"{file} {n}" for file, n in files.items())])
    return rows


def _failing(found: Comparison, selection: Selection) -> list[str]:
    return [
        f"[{world}] {test}: {outcome.reason[:160]}"
        for world, outcomes in found.pristine.items()
        for test, outcome in sorted(outcomes.items())
        if sort_of(outcome, selection) in ("failed", "hung")
    ]


def _listed(tests: dict[int, list[str]]) -> list[str]:
    return [f"[{world}] {test}" for world, here in tests.items() for test in here]


def _lost(found: Comparison) -> list[str]:
    lines = []
    for world, tests in found.lost.items():
        for test in tests:
            now = found.applied[world].get(test, Outcome("gone"))
            lines.append(f"[{world}] {test}: {now.outcome} {now.reason[:160]}")
    return lines


def table(heads: list[str], rows: list[list]) -> list[str]:
    """Lines of a Markdown table; columns of numbers to the right."""
    right = [all(isinstance(cell, int) for cell in column) for column in zip(*rows, strict=True)]
    cells = [heads, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: list[str]) -> str:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    dashes = ["-" * w + ("-:" if r else "--") for w, r in zip(widths, right, strict=True)]
    rule = "|".join(dashes)
    return [line(heads), f"|{rule}|", *map(line, cells[1:])]


def as_json(found: Comparison, selection: Selection) -> dict:
    """What `docs/developing.md` describes under "The outcomes as JSON"."""
    trees = {
        name: {
            str(world): {
                test: {**outcome._asdict(), "sort": sort_of(outcome, selection)}
                for test, outcome in sorted(outcomes.items())
            }
            for world, outcomes in worlds.items()
        }
        for name, worlds in (("pristine", found.pristine), ("applied", found.applied))
    }
    return {"release": found.release, **trees, "lost": found.lost, "wavering": found.wavering}
