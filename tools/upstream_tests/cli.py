# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of ``upstream_tests.sh``."""

import functools
import signal
import sys
import time
from pathlib import Path

from command_line import Parser, numbers
from overlay.checkout import Checkout
from overlay.cli import REPOSITORY, reported
from overlay.errors import NOT_THE_PIN, OverlayError
from upstream_tests import report
from upstream_tests.comparison import Comparison, compare
from upstream_tests.outcomes import Outcomes
from upstream_tests.selection import TESTS, Selection
from upstream_tests.trees import Overlay
from upstream_tests.worlds import World

LOST, USAGE = 1, 2


def _say(line: str) -> None:
    """Print progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def run(checkout: Path, worlds: list[int], only: str, root: Path, runtime: Path) -> int:
    """Compare pristine and applied copies of `checkout`; return the exit status.

    `root` has the patch set, and `runtime` our CPU runtime. Raises OverlayError.
    """
    version = Checkout(checkout).version
    if not (checkout / TESTS / "conftest.py").is_file():
        reason = "the PyPI package lacks upstream's tests; take a git checkout of the tag"
        raise OverlayError(NOT_THE_PIN, f"{checkout} has no {TESTS}: {reason}")
    selection = Selection.read(Path(__file__).parent / "selection.toml")
    files_of = {size: selection.files(checkout, size, only) for size in worlds}
    if not any(files_of.values()):
        _say(f"error: {only!r} fits the path of no selected test file")
        return USAGE
    work = root / "build/upstream-tests"
    pristine = Overlay(root).pristine_copy(checkout, work / "pristine")
    applied = Overlay(root).applied_copy(pristine, work / "applied")

    def run_world(size: int, name: str, tree: Path, files: list[str]) -> Outcomes:
        if not files:
            return {}
        began = time.monotonic()
        world = World(tree, size, runtime, work / f"runs/{name}-{size}")
        found = world.run(files, list(selection.excluded), _say)
        _say(f"{name}, world of {size}: {len(found)} tests in {time.monotonic() - began:.0f} s")
        return found

    found: dict[int, Comparison] = {}
    for size, files in files_of.items():
        found[size] = compare(pristine, applied, files, functools.partial(run_world, size))
    print("\n".join(report.summary(version, found, selection.excluded)))
    return LOST if any(comparison.lost for comparison in found.values()) else 0


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 nothing lost, 1 tests lost, 2 usage, else the refusal's."""
    parser = Parser(
        prog="upstream_tests.sh",
        description="Run upstream's own tests on a pristine and on an applied copy of CHECKOUT.",
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="git checkout of upstream")
    parser.add_argument("--worlds", type=numbers, default="1,2,4,8", metavar="N,…")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of paths of test files")
    options = parser.parse_args(argv)
    # Ending this process must end the ranks too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runtime = REPOSITORY / "megatron_overlay/megatron/core/cpu_runtime"
    checkout, worlds = options.checkout.resolve(), options.worlds
    return reported(lambda: run(checkout, worlds, options.only, REPOSITORY, runtime))
