# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Trials of features: each is staged alone, and its own tests and upstream's run in that tree."""

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from overlay.cli import REPOSITORY
from staging.description import commands, setting
from staging.features import Feature, Features
from upstream_tests.comparison import Run, compare
from upstream_tests.outcomes import Outcomes, passing
from upstream_tests.selection import Selection
from upstream_tests.worlds import World

HEAD = """\
| feature | ranks | its tests | upstream's on the pristine tree | on the staged | lost |
|---|---:|---|---:|---:|---:|"""
_OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
_SELECTION = REPOSITORY / "tools/upstream_tests/selection.toml"
_RUNTIME = REPOSITORY / "megatron_overlay/megatron/core/cpu_runtime"


@dataclasses.dataclass(frozen=True)
class Trial:
    """Results of one feature's tests on a number of ranks."""

    feature: str
    ranks: int
    ours_pass: bool  # False also if all of them are skipped
    outcomes: str  # what pytest counted
    pristine: int  # upstream's tests that pass without the feature
    staged: int
    lost: list[str]

    @property
    def passed(self) -> bool:
        return self.ours_pass and not self.lost

    def row(self) -> str:
        """Return a row of the table, with the lost tests below it."""
        counts = f"{self.pristine} | {self.staged} | {len(self.lost)}"
        ours = self.outcomes if self.ours_pass else f"**{self.outcomes or 'no tests'}**"
        row = f"| {self.feature} | {self.ranks} | {ours} | {counts} |"
        return "\n".join([row, *(f"lost: {test}" for test in self.lost)])


def try_feature(
    features: Features, feature: Feature, ranks: int, pristine: Path, tree: Path, out: Path
) -> Trial:
    """Run a feature's tests in its staged tree as its description says, and upstream's in both
    trees.

    Args:
        pristine: upstream's tree without the feature.
        out: folder for the logs.
    """
    log = out / f"{feature.name}-{ranks}.log"
    ours_pass, outcomes = True, "none"
    command = commands(features, feature).get(ranks)
    if command:
        code = _shell([*setting(features, feature), command], tree, log)
        counts = Counter({name: int(n) for n, name in _OUTCOME.findall(_last_line(log))})
        ours_pass = code == 0 and counts["passed"] > 0
        outcomes = ", ".join(f"{n} {name}" for name, n in counts.items())
    everything = Selection.read(_SELECTION)
    theirs = dataclasses.replace(
        everything, paths=[path.removeprefix("tests/unit_tests/") for path in feature.upstream]
    )
    scratch = out / f"{feature.name}-{ranks}-upstream"
    found = compare(pristine, tree, theirs.files(pristine, ranks), _runner(ranks, scratch, theirs))
    before, after = len(passing(found.pristine)), len(passing(found.applied))
    return Trial(feature.name, ranks, ours_pass, outcomes, before, after, found.lost)


def _shell(lines: list[str], tree: Path, log: Path) -> int:
    """Run shell lines of a description in a tree, without this repository on the path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    with log.open("w") as output:
        done = subprocess.run(
            ["bash", "-ec", "\n".join(lines)],
            cwd=tree,
            env=kept | {"PATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return done.returncode


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if " in " in line]
    return next((line for line in reversed(lines) if _OUTCOME.search(line)), "")


def _runner(ranks: int, scratch: Path, selection: Selection) -> Run:
    def run(name: str, tree: Path, files: list[str]) -> Outcomes:
        if not files:
            return {}
        world = World(tree, ranks, _RUNTIME, scratch / name)
        return world.run(files, list(selection.excluded), lambda line: None)

    return run
