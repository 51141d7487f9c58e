# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run every test: whole runs beside the plain ones, on two processes; then 2, 4 and 8 ranks.

    tests/run.py [pytest arguments]      e.g. tests/run.py --once, tests/run.py -k layout

Ranks see the checkout in build/ and this repository's tests/; the temporary directory shared by
the worlds holds the one-rank runs that they are compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKOUT = REPOSITORY / "build" / "Megatron-LM"
WORLDS = (2, 4, 8)
SHARED = ("-n", "2", "--dist", "loadfile")
"""Two processes, a file of tests to each in turn: fixtures of a module are made once."""
QUIET = ("-q", "-W", "ignore")
NO_TESTS = 5


def main(arguments: list[str]) -> int:
    """Run the stages one after the other; returns 0 if all passed."""
    failed = []
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared:
        environment = os.environ | {
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{REPOSITORY}",
            "ONE_RANK_RUNS": shared,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else each process imports the compiler, for seconds
        }

        def finish(name: str, process: subprocess.Popen) -> None:
            if process.wait() not in (0, NO_TESTS):
                failed.append(name)

        def finish_world(size: int) -> None:
            _announce(f"{size} ranks")
            finish(f"{size} ranks", start(_ranks(arguments, size)))

        start = partial(subprocess.Popen, cwd=REPOSITORY, env=environment)
        with tempfile.TemporaryFile("w+") as report:
            whole_runs = start(_pytest(arguments, "tests/e2e"), stdout=report, stderr=report)
            _announce("plain tests")
            plain = _pytest([*SHARED, *arguments], "tests/tools", "tests/unit_tests")
            finish("plain tests", start(plain))
            _announce("whole runs, beside these: they mostly wait")
            finish("whole runs", whole_runs)
            report.seek(0)
            print(report.read(), flush=True)
        for size in WORLDS:
            finish_world(size)
    print(f"\n===== {'failed: ' + ', '.join(failed) if failed else 'all stages passed'}")
    return 1 if failed else 0


def _announce(name: str) -> None:
    print(f"\n===== {name}", flush=True)


def _pytest(arguments: list[str], *paths: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *QUIET, *arguments, *paths]


def _ranks(arguments: list[str], size: int) -> list[str]:
    program = [sys.executable, "-W", "ignore", "-m", "tests.ranks", str(size)]
    return [*program, *QUIET, *arguments, "tests/unit_tests"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
