# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run every test: plain ones, then on two ranks; beside these whole runs, four ranks and eight.

    tests/run.py [pytest arguments]      e.g. tests/run.py --once, tests/run.py -k layout

Ranks see the checkout in build/ and this repository's tests/; the temporary directory shared by
the worlds holds the one-rank runs that they are compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKOUT = REPOSITORY / "build" / "Megatron-LM"
QUIET = ("-q", "-W", "ignore")
PASSED = (0, 5)
"""Exit codes of pytest: the other is that there was no such test."""

KEPT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def main(arguments: list[str]) -> int:
    """Run stages that compute, and beside them those that mostly wait; returns 0 if all passed."""
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared, ThreadPool(1) as pool:
        environment = os.environ | {
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{REPOSITORY}",
            "ONE_RANK_RUNS": shared,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else each process imports the compiler, for seconds
        }
        run = partial(subprocess.run, cwd=REPOSITORY, env=environment)
        waiting = {"whole runs": _pytest(arguments, "tests/e2e")}
        waiting |= {f"{size} ranks": _ranks(arguments, size) for size in (4, 8)}
        computing = {"plain tests": _pytest(arguments, "tests/tools", "tests/unit_tests")}
        computing |= {"2 ranks": _ranks(arguments, 2)}
        beside = pool.apply_async(_failed, (partial(run, **KEPT), waiting))
        failed = _failed(run, computing) + beside.get()
    print(f"\n===== {'failed: ' + ', '.join(failed) if failed else 'all stages passed'}")
    return 1 if failed else 0


def _failed(run: Callable[..., subprocess.CompletedProcess], stages: dict[str, list]) -> list[str]:
    """Run stages one after the other; what one says is shown at once, or, if kept, at its end."""
    failed = []
    for name, command in stages.items():
        print(f"\n===== {name} begin", flush=True)
        done = run(command)
        if done.stdout is not None:
            print(f"\n===== {name}\n{done.stdout}", flush=True)
        if done.returncode not in PASSED:
            failed.append(name)
    return failed


def _pytest(arguments: list[str], *paths: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *QUIET, *arguments, *paths]


def _ranks(arguments: list[str], size: int) -> list[str]:
    program = [sys.executable, "-W", "ignore", "-m", "tests.ranks", str(size)]
    return [*program, *QUIET, *arguments, "tests/unit_tests"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
