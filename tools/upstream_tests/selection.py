# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which of upstream's tests run, in which worlds, and how their failures are sorted."""

import fnmatch
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

TESTS = "tests/unit_tests"


@dataclass(frozen=True)
class Need:
    """What a test that does not pass lacks: other ranks, a GPU or a package."""

    kind: str  # "ranks" | "gpu" | "package"
    name: str
    pattern: re.Pattern


@dataclass(frozen=True)
class Selection:
    """The tests to run, as `selection.toml` lists them."""

    worlds: tuple[int, ...]
    one_rank: list[str]
    areas: dict[str, list[str]]
    excluded: dict[str, str]
    needs: tuple[Need, ...]

    @classmethod
    def read(cls, path: Path) -> "Selection":
        """Raises KeyError, `re.error` and `tomllib.TOMLDecodeError` for what is malformed."""
        table = tomllib.loads(path.read_text())
        needs = [Need(n["kind"], n["name"], re.compile(n["pattern"])) for n in table["needs"]]
        lists = table["one_rank"], table["areas"], table["excluded"]
        return cls(tuple(table["worlds"]), *lists, tuple(needs))

    def files(self, tree: Path) -> dict[str, str]:
        """Each selected test file that `tree` has, relative to it, with its area."""
        found: dict[str, str] = {}
        for area, paths in self.areas.items():
            for path in (tree / TESTS / name for name in paths):
                files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
                for file in files:
                    found.setdefault(file.relative_to(tree).as_posix(), area)
        return found

    def runs_in(self, file: str, world: int) -> bool:
        """Whether a file of `files` runs in a world of this size."""
        path = file.removeprefix(f"{TESTS}/")
        one_rank = any(path == name or path.startswith(f"{name}/") for name in self.one_rank)
        return world == 1 or not one_rank

    def need(self, reason: str) -> Need | None:
        """The first need whose pattern is in what a failure or a skip says."""
        return next((need for need in self.needs if need.pattern.search(reason)), None)


def matching(files: dict[str, str], pattern: str | None) -> dict[str, str]:
    """The files whose path or area has `pattern` in it, which may hold `*` and `?`."""
    if pattern is None:
        return files
    return {
        file: area
        for file, area in files.items()
        if any(fnmatch.fnmatch(name.lower(), f"*{pattern.lower()}*") for name in (file, area))
    }
