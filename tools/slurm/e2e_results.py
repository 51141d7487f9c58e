# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Results of cases: a file each, which outlives the job, and all of them as table and JUnit XML."""

from __future__ import annotations

import json
import os
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

    message: str
    seconds: float
    key: str
    job: str

    @classmethod
    def read(cls, directory: Path) -> Result | None:
        """Read the result in a case's directory; None if the case has not ended."""
        path = directory / "result.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def write(self, directory: Path) -> None:
        """Write the result into its case's directory."""
        write_whole(directory / "result.json", json.dumps(asdict(self)) + "\n")

    def holds(self, key: str, job: str) -> bool:
        """Return whether the case need not run again: only a new job repeats a failed case."""
        return self.key == key and (not self.message or self.job == job)


def write_whole(path: Path, text: str) -> None:
    """Write a file that other processes see complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def table(results: dict[str, Result]) -> str:
    """Return a line for each case, and one for all."""
    width = max(map(len, results), default=0)
    lines = [
        f"{name:<{width}}  {'FAILED' if result.message else 'passed'}"
        f"  {result.seconds:6.1f} s  {result.message}".rstrip()
        for name, result in results.items()
    ]
    failed = sum(bool(result.message) for result in results.values())
    return "\n".join([*lines, f"{len(results) - failed} passed, {failed} failed"])


def junit(results: dict[str, Result], directory: Path) -> str:
    """Return the results as JUnit XML, where a failure has the end of its log.

    Args:
        directory: the directory with those of the cases.
    """
    suite = ElementTree.Element("testsuite", name="e2e", tests=str(len(results)))
    suite.set("failures", str(sum(bool(result.message) for result in results.values())))
    suite.set("time", f"{sum(result.seconds for result in results.values()):.1f}")
    for name, result in results.items():
        attributes = {"classname": "e2e", "name": name, "time": f"{result.seconds:.1f}"}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if result.message:
            failure = ElementTree.SubElement(case, "failure", message=result.message)
            failure.text = _log_tail(directory / name / "log.txt")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _log_tail(path: Path) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = "\n".join(text.splitlines()[-LOG_TAIL:])
    return "".join(c for c in lines if c.isprintable() or c in "\n\t")
