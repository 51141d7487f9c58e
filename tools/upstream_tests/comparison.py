# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the selected tests on both trees; the pristine one's outcomes are kept for the next time."""

import json
import platform
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from upstream_tests.outcomes import Outcome, Outcomes, difference, file_of
from upstream_tests.selection import Selection
from upstream_tests.trees import content_hash, release
from upstream_tests.worlds import PLUGIN, World


@dataclass
class Comparison:
    """What became of each test, by world."""

    release: str
    pristine: dict[int, Outcomes] = field(default_factory=dict)
    applied: dict[int, Outcomes] = field(default_factory=dict)  # empty: was not run
    lost: dict[int, list[str]] = field(default_factory=dict)  # lost twice
    wavering: dict[int, list[str]] = field(default_factory=dict)  # lost once


@dataclass(frozen=True)
class Runner:
    """Runs `files` (with their areas) in `worlds`, on copies of a checkout in the folder `work`.

    `cpu_runtime` is the folder of our package, for both trees.
    """

    work: Path
    cpu_runtime: Path
    selection: Selection
    files: dict[str, str]
    worlds: list[int]

    def compare(self, pristine: Path, applied: Path | None) -> Comparison:
        """Run both trees, or with None the pristine one only. What is lost must be lost twice."""
        found = Comparison(release(pristine))
        cache = Cache.of(pristine, self.cpu_runtime, self.work)
        for world in self.worlds:
            files = self._files_in(world)
            new = [file for file in files if not cache.has(world, file)]
            if new:
                cache.put(world, new, self._run("pristine", pristine, world, new))
            found.pristine[world] = cache.get(world, files)
        for world in self.worlds if applied else []:
            outcomes = self._run("applied", applied, world, self._files_in(world))
            found.applied[world] = outcomes
            lost = difference(found.pristine[world], outcomes).lost
            confirmed = self._lost_again(lost, pristine, applied, world)
            found.lost[world] = [test for test in lost if test in confirmed]
            found.wavering[world] = [test for test in lost if test not in confirmed]
        return found

    def _files_in(self, world: int) -> list[str]:
        return [file for file in self.files if self.selection.runs_in(file, world)]

    def _lost_again(self, lost: list[str], pristine: Path, applied: Path, world: int) -> set[str]:
        """Run the files of `lost` again on both trees: a busy machine must not look like a loss."""
        files = list(dict.fromkeys(file_of(test) for test in lost))
        if not files:
            return set()
        before = self._run("pristine-again", pristine, world, files)
        after = self._run("applied-again", applied, world, files)
        return set(difference(before, after).lost)

    def _run(self, name: str, tree: Path, world: int, files: list[str]) -> Outcomes:
        began = time.monotonic()
        say(f"{name}, world of {world}: {len(files)} files")
        ranks = World(tree, world, self.cpu_runtime, self.work / "runs" / f"{name}-{world}")
        found = ranks.run(files, list(self.selection.excluded), say)
        say(f"  {len(found)} tests in {time.monotonic() - began:.0f} s")
        return found


class Cache:
    """Outcomes on a pristine tree, kept by world and file in one JSON file."""

    def __init__(self, path: Path):
        self._path = path
        self._kept = json.loads(path.read_text()) if path.exists() else {}

    @classmethod
    def of(cls, tree: Path, cpu_runtime: Path, folder: Path) -> "Cache":
        """The cache of one state of the tree, our runtime and plugin, Python, torch and pytest."""
        versions = [platform.python_version(), version("torch"), version("pytest")]
        key = content_hash(tree, cpu_runtime, PLUGIN)[:12]
        return cls(folder / f"pristine-{'-'.join([release(tree), *versions, key])}.json")

    def has(self, world: int, file: str) -> bool:
        """Whether the file has been run in this world."""
        return f"{world} {file}" in self._kept

    def get(self, world: int, files: list[str]) -> Outcomes:
        """The kept outcomes of files that it has."""
        kept = (self._kept[f"{world} {file}"] for file in files)
        return {test: Outcome(*found) for tests in kept for test, found in tests.items()}

    def put(self, world: int, files: list[str], outcomes: Outcomes) -> None:
        """Keep all outcomes of `files` in one world."""
        for file in files:
            own = {test: found for test, found in outcomes.items() if file_of(test) == file}
            self._kept[f"{world} {file}"] = own
        self._path.write_text(json.dumps(self._kept))


def say(line: str) -> None:
    """Tell the user, on standard error, how far the run is."""
    print(line, file=sys.stderr, flush=True)
