# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of ``upstream_tests.sh``: selection of tests, comparison and report."""

import contextlib
import re
import shutil
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from command_line import Parser, numbers  # noqa: E402
from overlay.checkout import Checkout  # noqa: E402
from overlay.cli import REPOSITORY, reported  # noqa: E402
from overlay.cli import main as overlay  # noqa: E402
from overlay.errors import NOT_THE_PIN, USAGE, OverlayError  # noqa: E402
from overlay.git import user_git  # noqa: E402
from upstream_tests.worlds import Comparison, Outcome, Outcomes, World, compare  # noqa: E402

LOST = 1
TESTS = "tests/unit_tests"
RUNTIME = REPOSITORY / "megatron_overlay/megatron/core/cpu_runtime"
SELECTION = tomllib.loads((Path(__file__).parent / "selection.toml").read_text())
_FOR_RANKS = re.compile("initialize_|init_process_group|get_world_size|WORLD_SIZE")
"""Words by which a file is known to have tests that may need several ranks."""
EXCLUDED: dict[str, str] = SELECTION["excluded"]
_say = partial(print, file=sys.stderr, flush=True)  # progress


def selected(tree: Path, world: int, only: str = "*") -> list[str]:
    """Return the test files of `tree`, relative to it, that run in a world of this size.

    `only` is a pattern for the paths below `tests/unit_tests`.
    """
    root, files = tree / TESTS, set()
    for path in (path for pattern in SELECTION["paths"] for path in root.glob(pattern)):
        files |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    if world > 1:
        files = {file for file in files if _FOR_RANKS.search(file.read_text())}
        files -= {root / path for path in SELECTION["one_rank"]}
    return [str(f.relative_to(tree)) for f in sorted(files) if fnmatch(f.relative_to(root), only)]


def clone(checkout: Path, tree: Path, branch: str | None = None) -> Path:
    """Clone a git checkout's commit, or its branch, to `tree`, in place of what is there.

    Raises:
        OverlayError: `checkout` is not the top of a git checkout, or lacks the branch.
    """
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    which = ("--branch", branch) if branch else ()
    if user_git(Path(), "clone", "--quiet", *which, "--", str(checkout), str(tree)).returncode:
        of = f" with branch {branch}" if branch else ""
        raise OverlayError(NOT_THE_PIN, f"{checkout} is not the top of a git checkout{of}")
    return tree


def run(
    checkout: Path,
    worlds: list[int],
    only: str,
    branch: str | None = None,
    root: Path = REPOSITORY,
    runtime: Path = RUNTIME,
) -> int:
    """Compare a pristine clone of `checkout` with an applied one, or with its branch.

    `root` has the patch set, and `runtime` our CPU runtime. Return the exit status, or raise
    OverlayError.
    """
    work = root / "build/upstream-tests"
    pristine = clone(checkout, work / "pristine")
    version = Checkout(pristine).version
    files_of = {size: selected(pristine, size, only) for size in worlds}
    if not any(files_of.values()):
        _say(f"error: {only!r} fits the path of no selected test file")
        return USAGE
    applied = clone(checkout, work / "applied", branch)
    if not branch:
        with contextlib.redirect_stdout(None):
            refused = overlay(["--root", str(root), "apply", str(applied)])
        if refused:
            return refused
    trees = {"pristine": pristine, "applied": applied, "applied-again": applied}

    def run_world(size: int, name: str, files: list[str]) -> Outcomes:
        began = time.monotonic()
        world = World(trees[name], size, runtime, work / f"runs/{name}-{size}")
        found = world.run(files, list(EXCLUDED))
        _say(f"{name}, world of {size}: {len(found)} tests in {time.monotonic() - began:.0f} s")
        return found

    found = {size: compare(files, partial(run_world, size)) for size, files in files_of.items()}
    print(f"Upstream's tests of {version}\n")
    print("\n".join(report(found)))
    return LOST if any(comparison.lost for comparison in found.values()) else 0


def report(worlds: dict[int, Comparison]) -> Iterator[str]:
    """Yield a line of counts for each world, and those that name tests."""
    for size, found in worlds.items():
        for name, outcomes in (("pristine", found.pristine), ("applied", found.applied)):
            counts = Counter(one.outcome for one in outcomes.values())
            yield f"world of {size}, {name}: " + ", ".join(f"{n} {x}" for x, n in counts.items())
    for test, why in EXCLUDED.items():
        yield f"not run: {test}: {why}"
    for size, found in worlds.items():
        for test in found.wavering:
            yield f"passed on the pristine tree, then once not on the applied one: [{size}] {test}"
        for test in found.lost:
            outcome, reason = found.applied.get(test, Outcome("gone"))
            yield f"LOST: [{size}] {test}: {outcome} {reason[:160]}".rstrip()


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 nothing lost, 1 tests lost, 2 usage, else the refusal's."""
    parser = Parser(
        prog="upstream_tests.sh",
        description="Run upstream's own tests on a pristine and on an applied clone of CHECKOUT.",
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="git checkout of upstream")
    parser.add_argument("--worlds", type=numbers, default="1,2,4,8", metavar="N,…")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of paths of test files")
    parser.add_argument("--branch", metavar="B", help="run on it instead of the applied clone")
    options = parser.parse_args(argv)
    # Ending this process must end the ranks too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checkout, rest = options.checkout.resolve(), (options.worlds, options.only, options.branch)
    return reported(lambda: run(checkout, *rest))


if __name__ == "__main__":
    sys.exit(main())
