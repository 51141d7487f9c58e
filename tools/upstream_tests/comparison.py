# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of the same tests on both trees, in one world."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from upstream_tests.outcomes import Outcomes, file_of, passing

Run = Callable[[str, Path, list[str]], Outcomes]
"""Runs test files on a tree, under a name for display."""


@dataclass(frozen=True)
class Comparison:
    """Outcomes of the tests of one world on both trees."""

    pristine: Outcomes
    applied: Outcomes
    lost: list[str]  # pass on the pristine tree, and fail to pass twice on the applied one
    wavering: list[str]  # pass on the applied tree only at the second attempt


def compare(pristine: Path, applied: Path, files: list[str], run: Run) -> Comparison:
    """Run `files` on both trees; repeat tests that seem lost, as the machine may have been busy."""
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
