# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Results of cases: a file each, which outlives the job, and all of them as table and JUnit XML."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

LOG_TAIL = 60
"""Last lines of a failed case's log that its report includes."""


@dataclass(frozen=True)
class Result:
    """The result of a case.

    Attributes:
        message: why it failed; empty if it passed.
        key: hash of everything that the result depends on.
        job: number of the Slurm job, which stays the same when it is requeued.
    """

    name: str
    message: str
    seconds: float
    key: str
    job: str

    @property
    def passed(self) -> bool:
        """Whether the case passed."""
        return not self.message

    def holds(self, key: str, job: str) -> bool:
        """Return whether the case need not run again: only a new job repeats a failed case."""
        return self.key == key and (self.passed or self.job == job)


def write_whole(path: Path, text: str) -> None:
    """Write a file that other processes see complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_result(directory: Path, result: Result) -> None:
    """Write a result into its case's directory."""
    write_whole(directory / "result.json", json.dumps(asdict(result)) + "\n")


def read_result(directory: Path) -> Result | None:
    """Read the result of a case; None if it has not ended."""
    path = directory / "result.json"
    return Result(**json.loads(path.read_text())) if path.exists() else None


def table(results: Iterable[Result]) -> str:
    """Return a line for each case, and one for all."""
    results = list(results)
    width = max((len(result.name) for result in results), default=0)
    lines = [
        f"{result.name:<{width}}  {'passed' if result.passed else 'FAILED'}"
        f"  {result.seconds:6.1f} s  {result.message}".rstrip()
        for result in results
    ]
    failed = sum(not result.passed for result in results)
    return "\n".join([*lines, f"{len(results) - failed} passed, {failed} failed"])


def junit(results: Iterable[Result], directory: Path) -> str:
    """Return the results as JUnit XML, where a failure has the end of its log.

    Args:
        directory: the directory with those of the cases.
    """
    results = list(results)
    suite = ElementTree.Element(
        "testsuite",
        name="e2e",
        tests=str(len(results)),
        failures=str(sum(not result.passed for result in results)),
        time=f"{sum(result.seconds for result in results):.1f}",
    )
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname="e2e", name=result.name, time=f"{result.seconds:.1f}"
        )
        if not result.passed:
            failure = ElementTree.SubElement(case, "failure", message=result.message)
            failure.text = _log_tail(directory / result.name / "log.txt")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _log_tail(path: Path) -> str:
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL:]
    return "".join(c for c in "\n".join(lines) if c.isprintable() or c in "\n\t")
