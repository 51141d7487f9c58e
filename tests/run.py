# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run every test, in four lanes at once: 1 rank, 4 ranks, tools and then 2 ranks, whole runs and
then 8 ranks.

    tests/run.py [pytest arguments]      e.g. tests/run.py --once, tests/run.py -k layout

Each lane often waits for something, and together they keep two cores busy. Ranks see the checkout
in build/ (with NEXT set, build/next) and this repository's tests/; the temporary directory shared
by the worlds holds the one-rank runs that they are compared with.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKOUT = REPOSITORY / "build" / ("next" if os.environ.get("NEXT") else "Megatron-LM")
QUIET = ("-q", "-W", "ignore", "--tb=no")  # failures are printed as they come
QUIET += ("-p", "no:unraisableexception")  # it collects garbage for seconds, for warnings alone
BEGUN, ALL_BEGUN = "TESTS_BEGUN", "all"  # as tests/conftest.py has them
LANES = (
    {"one rank": ("pytest", *QUIET, "tests/unit_tests")},
    {"4 ranks": ("tests.ranks", "4", *QUIET, "tests/unit_tests")},
    {
        "tools": ("pytest", *QUIET, "tests/tools"),
        "2 ranks": ("tests.ranks", "2", *QUIET, "tests/unit_tests"),
    },
    {
        "whole runs": ("pytest", *QUIET, "tests/e2e"),
        "8 ranks": ("tests.ranks", "8", *QUIET, "tests/unit_tests"),
    },
)
"""The lanes; stages of a lane run one after the other."""
SHOWN = "one rank"
"""The stage whose output is shown at once."""
RESOLVER = "timeout:1 attempts:5"
"""PyTorch's store looks up the names of loopback addresses, one by one. Where they are asked of a
name server, an answer that is lost would stop a rank for 5 seconds by default."""
PASSED = (0, 5)
"""Exit codes of pytest that pass: 5 means that no test was selected."""


def main(arguments: list[str]) -> int:
    """Run all stages; show the first one's output at once, the others' when they have ended.

    Returns 0 if all passed.
    """
    failed = []
    with (
        tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared,
        ThreadPoolExecutor(len(LANES)) as pool,
    ):
        lanes = [pool.submit(_run, lane, arguments, Path(shared)) for lane in LANES]
        for lane, running in zip(LANES, lanes, strict=True):
            for name, code in zip(lane, running.result(), strict=True):
                if code not in PASSED:
                    failed.append(name)
                if name != SHOWN:
                    print(f"\n===== {name}\n{_log(Path(shared), name).read_text()}", flush=True)
    print(f"\n===== {'failed: ' + ', '.join(failed) if failed else 'all stages passed'}")
    return 1 if failed else 0


def _run(lane: dict[str, tuple[str, ...]], arguments: list[str], shared: Path) -> list[int]:
    """Run a lane's stages; returns their exit codes."""
    environment = os.environ | {
        "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{REPOSITORY}",
        "ONE_RANK_RUNS": str(shared),
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": RESOLVER,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled, Megatron starts a fifth faster
    codes = []
    for name, module in lane.items():
        command = [sys.executable, "-W", "ignore", "-m", *module, *arguments]
        with _log(shared, name).open("w") as log:
            said = None if name == SHOWN else log
            codes.append(_stage(command, environment, shared / f"{name}.begun", said))
    return codes


def _stage(command: list[str], environment: dict, begun: Path, said: TextIO | None) -> int:
    """Run a stage; where a test ends the process, start again with the tests after it.

    Returns the exit code of the first process that failed, 0 if none did.
    """
    begun.touch()
    failed = 0
    while True:
        before = begun.read_text()
        environment |= {BEGUN: str(begun)}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=said, stderr=said)
        failed = failed or (done.returncode not in PASSED and done.returncode)
        after = begun.read_text()
        if after == before or ALL_BEGUN in after.splitlines():
            return int(failed)


def _log(shared: Path, name: str) -> Path:
    return shared / f"{name}.log"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
