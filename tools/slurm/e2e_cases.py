# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The cases of a batch: reading them from a file, choosing some, and checking their results."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

DEVICES = ("cpu", "gpu")
OTHER_CASE = re.compile(r"\{([\w-]+)\}")


@dataclass(frozen=True)
class Case:
    """One run of the program, in its own torchrun.

    Attributes:
        steps: the first and the last step that it records.
        same_as: the first case of its group, whose losses and gradient norms it must reproduce.
        tolerance: relative tolerance of that comparison.
    """

    name: str
    device: str
    ranks: int
    limit_s: int
    steps: tuple[int, int]
    tolerance: float
    arguments: str
    same_as: str

    @property
    def needs(self) -> list[str]:
        """Names of the cases that must have passed before."""
        named = (self.same_as, *OTHER_CASE.findall(self.arguments))
        return [name for name in dict.fromkeys(named) if name != self.name]

    def command_line(self, directory: Path) -> list[str]:
        """Return the program's arguments; ``directory`` has a directory for each case, by name."""
        text = OTHER_CASE.sub(lambda match: shlex.quote(str(directory / match[1])), self.arguments)
        return [*shlex.split(text), "--metrics-out", str(directory / self.name / "metrics.jsonl")]


def read_cases(path: Path, device: str) -> list[Case]:
    """Read a device's cases from a file, in its order.

    Raises:
        ValueError: there is none, two cases have the same name, or a case needs one that does not
            come before it.
    """
    common = tomllib.loads(path.read_text()).get(device)
    if common is None:
        raise ValueError(f"{path} has no {device} cases")
    cases: dict[str, Case] = {}
    for group in common.pop("group"):
        entries = group.pop("case")
        for name, entry in entries.items():
            values = common | group | entry
            texts = (level.get("arguments", "") for level in (common, group, entry))
            values["arguments"] = " ".join(" ".join(texts).split())
            case = Case(name, device, same_as=next(iter(entries)), **values)
            if name in cases:
                raise ValueError(f"{path}: two cases are called {name}")
            for other in case.needs:
                if other not in cases:
                    raise ValueError(f"{path}: {name} needs {other}, which must come before it")
            cases[name] = case
    return list(cases.values())


def choose(cases: list[Case], patterns: list[str]) -> list[Case]:
    """Return the cases whose names match a pattern, and all that these need.

    Raises:
        ValueError: a pattern matches no case.
    """
    for pattern in patterns:
        if not any(fnmatch(case.name, pattern) for case in cases):
            raise ValueError(f"--only {pattern}: no such {cases[0].device} case; --list names them")
    chosen: set[str] = set()
    for case in reversed(cases):
        if case.name in chosen or any(fnmatch(case.name, pattern) for pattern in patterns or "*"):
            chosen.update((case.name, *case.needs))
    return [case for case in cases if case.name in chosen]


def what_is_wrong(case: Case, directory: Path) -> str:
    """Return why the records of a successful run are wrong; empty if they are right."""
    found, wanted = (_records(directory / name) for name in (case.name, case.same_as))
    first, last = case.steps
    if sorted(found) != list(range(first, last + 1)):
        return f"it recorded steps {sorted(found)}, not {first} to {last}"
    for step, record in sorted(found.items()):
        for name in ("loss", "grad_norm"):
            one, other = record[name], wanted[step][name]
            if one is None or other is None or abs(one - other) > case.tolerance * abs(other):
                return (
                    f"step {step} has {name} {one}, and {case.same_as} has {other}: "
                    f"more than {case.tolerance:g} apart"
                )
    return ""


def _records(directory: Path) -> dict[int, dict]:
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["step"]: record for record in map(json.loads, lines)}
