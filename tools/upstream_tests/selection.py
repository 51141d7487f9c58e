# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Selection of upstream's tests and their worlds."""

import fnmatch
import tomllib
from dataclasses import dataclass
from pathlib import Path

TESTS = "tests/unit_tests"


@dataclass(frozen=True)
class Selection:
    """The tests to run, as `selection.toml` lists them."""

    paths: list[str]
    one_rank: list[str]
    excluded: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Selection":
        """Read `selection.toml`; raise TypeError or `tomllib.TOMLDecodeError`."""
        return cls(**tomllib.loads(path.read_text()))

    def files(self, tree: Path, world: int, only: str = "*") -> list[str]:
        """Return the test files of `tree`, relative to it, that run in a world of this size.

        `only` is a pattern for the paths below `tests/unit_tests`.
        """
        found = set(_below(tree / TESTS, self.paths))
        if world > 1:
            found -= set(_below(tree / TESTS, self.one_rank))
        return [f"{TESTS}/{file}" for file in sorted(found) if fnmatch.fnmatch(file, only)]


def _below(folder: Path, paths: list[str]) -> list[str]:
    """Return the test files at or below `paths`, patterns that are relative to `folder`."""
    files = []
    for path in (path for pattern in paths for path in folder.glob(pattern)):
        files += [path] if path.is_file() else path.rglob("test_*.py")
    return [file.relative_to(folder).as_posix() for file in files]
