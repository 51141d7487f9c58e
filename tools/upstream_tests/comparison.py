# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The same tests on both trees, in one world."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from upstream_tests.outcomes import Outcomes, file_of, passing

Run = Callable[[str, Path, list[str]], Outcomes]
"""Runs test files on a tree, under a name that is shown."""


@dataclass(frozen=True)
class Comparison:
    """What became of each test of one world."""

    pristine: Outcomes
    applied: Outcomes
    lost: list[str]  # pass on the pristine tree, and twice not on the applied one
    wavering: list[str]  # once not


def compare(pristine: Path, applied: Path, files: list[str], run: Run) -> Comparison:
    """Run `files` on both trees, and once more what seems lost: the machine may have been busy."""
    before, after = run("pristine", pristine, files), run("applied", applied, files)
    missing = sorted(passing(before) - passing(after))
    again = run("applied-again", applied, list(dict.fromkeys(map(file_of, missing))))
    recovered = passing(again)
    return Comparison(
        before,
        after,
        lost=[test for test in missing if test not in recovered],
        wavering=[test for test in missing if test in recovered],
    )
