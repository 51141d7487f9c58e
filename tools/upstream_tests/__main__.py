# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run upstream's own tests on a pristine and on an applied clone, by ``upstream_tests.sh``."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from command_line import Parser, numbers  # noqa: E402
from overlay.__main__ import REPOSITORY, reported  # noqa: E402
from overlay.__main__ import main as overlay  # noqa: E402
from overlay.errors import NOT_THE_PIN, USAGE, OverlayError  # noqa: E402

TESTS = "tests/unit_tests"
IN_TREE = Path(__file__).parent / "in_tree.py"
SELECTION = tomllib.loads((Path(__file__).parent / "selection.toml").read_text())
EXCLUDED: dict[str, str] = SELECTION["excluded"]
WORST_FIRST = ("hung", "failed", "passed", "skipped")
Test = tuple[int, str]  # number of ranks, node id


def selected(tree: Path, worlds: list[int], only: str) -> list[Test]:
    """Return the numbers of ranks and test files, relative to the tree, that are to run."""
    files = set()
    for path in (path for pattern in SELECTION["paths"] for path in (tree / TESTS).glob(pattern)):
        files |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    names = sorted(str(file.relative_to(tree / TESTS)) for file in files)
    names = [name for name in names if fnmatch(name, only)]
    alone = [name for name in names if not any(fnmatch(name, p) for p in SELECTION["ranks"])]
    return [(n, f"{TESTS}/{name}") for n in worlds for name in names if n == 1 or name not in alone]


def outcomes(tree: Path, jobs: list[Test]) -> dict[Test, tuple[str, str]]:
    """Run tests, or all of a file, in a tree; return outcomes, with the reason for a failure.

    A test passes if it passes on every rank that does not skip it.
    """
    records = tree.parent / f"{tree.name}-records"
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    kept |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, IN_TREE, REPOSITORY / "megatron_overlay", records]
    lines = ["\t".join([str(size), file, *EXCLUDED]) for size, file in jobs]
    with (records / "log").open("w") as log:
        how = {"cwd": tree, "env": kept, "stdout": log, "stderr": log, "text": True}
        subprocess.run(command, input="\n".join(lines), **how)
    found = {}
    for number, (size, file) in enumerate(jobs):
        record, ranks = records / f"{number}.jsonl", {}
        lines = record.read_text().splitlines() if record.exists() else []
        for rank, test, *outcome in map(json.loads, lines or [json.dumps([0, file, "hung", ""])]):
            ranks.setdefault(test, {})[rank] = outcome
        for test, each in ranks.items():
            worst = min(each.values(), key=lambda one: WORST_FIRST.index(one[0]))
            found[size, test] = tuple(worst)
    return found


def passing(found: dict[Test, tuple[str, str]]) -> set[Test]:
    return {test for test, (outcome, _) in found.items() if outcome == "passed"}


def clone(checkout: Path, tree: Path, *options: str) -> Path:
    """Clone a git checkout's commit in place of what is at `tree`."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["git", "clone", "--quiet", *options, "--", checkout, tree]).returncode:
        raise OverlayError(NOT_THE_PIN, f"{checkout} is not the top of a git checkout")
    return tree


@reported
def main(argv: list[str] | None = None) -> int:
    """Return 0 if nothing is lost, 1 if tests are, 2 for a wrong command line."""
    parser = Parser(prog="upstream_tests.sh", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="git checkout of upstream")
    parser.add_argument("--worlds", type=numbers, default="1,2,4,8", metavar="N,…")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of paths of test files")
    parser.add_argument("--branch", metavar="B", help="run on it instead of the applied clone")
    options = parser.parse_args(argv)
    work = options.root / "build/upstream-tests"
    pristine = clone(options.checkout, work / "pristine")
    branch = ("--branch", options.branch) if options.branch else ()
    applied = clone(options.checkout, work / "applied", *branch)
    with contextlib.redirect_stdout(None):
        if not branch and (code := overlay(["--root", str(options.root), "apply", str(applied)])):
            return code
    jobs = selected(pristine, options.worlds, options.only)
    if not jobs:
        raise OverlayError(USAGE, f"{options.only!r} fits the path of no selected test file")
    before, after = outcomes(pristine, jobs), outcomes(applied, jobs)
    for name, found in (("pristine", before), ("applied", after)):
        for world in options.worlds:
            counts = Counter(outcome for (size, _), (outcome, _) in found.items() if size == world)
            print(f"{name}, {world} ranks: " + ", ".join(f"{n} {x}" for x, n in counts.items()))
    missing = passing(before) - passing(after)
    again = outcomes(applied, sorted(missing))  # as the machine may have been busy
    for test in sorted(missing):
        what = "passed again" if test in passing(again) else "LOST"
        print(f"{what}: {test[0]} ranks, {test[1]}:", *after.get(test, ("gone",)))
    return 1 if missing - passing(again) else 0


if __name__ == "__main__":
    sys.exit(main())
