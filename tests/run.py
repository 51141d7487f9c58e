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


def main(arguments: list[str]) -> int:
    """Run both lanes of stages; returns 0 if all passed."""
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared, ThreadPool(1) as pool:
        environment = os.environ | {
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{REPOSITORY}",
            "ONE_RANK_RUNS": shared,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else each process imports the compiler, for seconds
        }
        run = partial(subprocess.run, cwd=REPOSITORY, env=environment)
        beside = pool.apply_async(_beside, (run, arguments))
        failed = []
        print("\n===== plain tests; beside them: whole runs, 4 and 8 ranks", flush=True)
        if run(_pytest(arguments, "tests/tools", "tests/unit_tests")).returncode not in PASSED:
            failed.append("plain tests")
        print("\n===== 2 ranks", flush=True)
        if run(_ranks(arguments, 2)).returncode not in PASSED:
            failed.append("2 ranks")
        failed += beside.get()
    print(f"\n===== {'failed: ' + ', '.join(failed) if failed else 'all stages passed'}")
    return 1 if failed else 0


def _beside(run: Callable[..., subprocess.CompletedProcess], arguments: list[str]) -> list[str]:
    """Stages that mostly wait: for each other, for a port, for a timeout. Returns what failed.

    What a stage says is printed when it has ended.
    """
    failed = []
    stages = {"whole runs": _pytest(arguments, "tests/e2e")}
    stages |= {f"{size} ranks": _ranks(arguments, size) for size in (4, 8)}
    for name, command in stages.items():
        done = run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
