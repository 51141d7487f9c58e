# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Trials of features: each is staged alone, and its own tests and upstream's run in that tree."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

from overlay.cli import REPOSITORY
from staging.features import TESTS, Feature, Features
from staging.stage import Staging
from upstream_tests.comparison import Comparison, compare
from upstream_tests.outcomes import Outcomes, passing
from upstream_tests.selection import Selection
from upstream_tests.worlds import World

HEAD = """\
| feature | ranks | its tests | upstream's on the pristine tree | on the staged | lost |
|---|---:|---|---:|---:|---:|"""
_OUTCOME = re.compile(r"\d+ (?:passed|failed|errors?|skipped)\b")
_SELECTION = REPOSITORY / "tools/upstream_tests/selection.toml"
_RUNTIME = REPOSITORY / "megatron_overlay/megatron/core/cpu_runtime"


def try_each(staging: Staging, wanted: list[Feature], worlds: list[int] | None, out: Path) -> bool:
    """Stage each feature on those it needs, run its tests and upstream's there, and print a row of
    a table for each; return whether all passed.

    Args:
        worlds: numbers of ranks; None for those that the feature's tests need.
        out: folder for the logs.

    Raises:
        OverlayError: a feature cannot be staged.
    """
    features, passed = staging.features, True
    out.mkdir(parents=True, exist_ok=True)
    print(HEAD, flush=True)
    with staging.worktree() as pristine:
        for feature in wanted:
            with staging.worktree() as tree:
                for one in features.stack(feature.name):
                    staging.commit(one, tree)
                for ranks in worlds or features.ranks_of(feature):
                    log = out / f"{feature.name}-{ranks}"
                    works, ours = _own_tests(features, feature, ranks, tree, log)
                    theirs = _upstreams_tests(feature, ranks, pristine, tree, log)
                    counts = (len(passing(theirs.pristine)), len(passing(theirs.applied)))
                    row = f"| {feature.name} | {ranks} | {ours if works else f'**{ours}**'}"
                    print(f"{row} | {counts[0]} | {counts[1]} | {len(theirs.lost)} |")
                    print(*(f"lost: {test}\n" for test in theirs.lost), sep="", end="", flush=True)
                    passed = passed and works and not theirs.lost
    return passed


def _own_tests(
    features: Features, feature: Feature, ranks: int, tree: Path, log: Path
) -> tuple[bool, str]:
    """Run a feature's tests as its description says, without this repository on the path.

    Return whether a test passed and none failed, and what pytest counted.
    """
    command = features.commands(feature).get(ranks)
    if command is None:
        return True, "none"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    lines = "\n".join([*features.setting(feature), command])
    with log.with_suffix(".log").open("w+", errors="replace") as output:
        done = subprocess.run(
            ["bash", "-ec", lines],
            cwd=tree,
            env=kept | {"PATH": path},
            stdout=output,
            stderr=output,
        )
        output.seek(0)
        counts = [_OUTCOME.findall(line) for line in output if " in " in line]
    outcome = ", ".join(next(filter(None, reversed(counts)), ["no tests"]))
    return done.returncode == 0 and "passed" in outcome, outcome


def _upstreams_tests(
    feature: Feature, ranks: int, pristine: Path, tree: Path, log: Path
) -> Comparison:
    """Run upstream's tests of the files that a feature changes, in both trees."""
    paths = [path.removeprefix(f"{TESTS}/") for path in feature.upstream]
    selection = dataclasses.replace(Selection.read(_SELECTION), paths=paths)

    def run(name: str, tree: Path, files: list[str]) -> Outcomes:
        if not files:
            return {}
        world = World(tree, ranks, _RUNTIME, log.with_name(f"{log.name}-upstream") / name)
        return world.run(files, list(selection.excluded), lambda line: None)

    return compare(pristine, tree, selection.files(pristine, ranks), run)
