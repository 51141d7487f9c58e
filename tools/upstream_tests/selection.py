# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Selection of upstream's tests and their worlds, and classification of their failures."""

import fnmatch
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

TESTS = "tests/unit_tests"


@dataclass(frozen=True)
class Need:
    """A need that keeps a test from passing: other ranks, a GPU or a package."""

    kind: str  # "ranks" | "gpu" | "package"
    name: str
    pattern: re.Pattern


@dataclass(frozen=True)
class Selection:
    """The tests to run, as `selection.toml` lists them."""

    paths: list[str]
    one_rank: list[str]
    excluded: dict[str, str]
    needs: tuple[Need, ...]

    @classmethod
    def read(cls, path: Path) -> "Selection":
        """Read `selection.toml`; raise KeyError, `re.error` or `tomllib.TOMLDecodeError`."""
        table = tomllib.loads(path.read_text())
        needs = (Need(n["kind"], n["name"], re.compile(n["pattern"])) for n in table["needs"])
        return cls(table["paths"], table["one_rank"], table["excluded"], tuple(needs))

    def files(self, tree: Path, world: int, only: str = "*") -> list[str]:
        """Return the test files of `tree`, relative to it, that run in a world of this size.

        `only` is a pattern for the paths below `tests/unit_tests`.
        """
        found = set(_below(tree / TESTS, self.paths))
        if world > 1:
            found -= set(_below(tree / TESTS, self.one_rank))
        return [f"{TESTS}/{file}" for file in sorted(found) if fnmatch.fnmatch(file, only)]

    def need(self, reason: str) -> Need | None:
        """Return the first need whose pattern matches the message of a failure or skip."""
        return next((need for need in self.needs if need.pattern.search(reason)), None)


def _below(folder: Path, paths: list[str]) -> list[str]:
    """Return the test files at or below `paths`, relative to `folder`."""
    files = []
    for path in (folder / name for name in paths):
        files += [path] if path.is_file() else path.rglob("test_*.py")
    return [file.relative_to(folder).as_posix() for file in files]
