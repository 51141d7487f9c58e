# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run every test, in four processes at once: tools, one rank, 2 to 8 ranks, whole runs.

    tests/run.py [pytest arguments]      e.g. tests/run.py --once, tests/run.py -k layout

Each of the four often waits for something, and together they keep two cores busy. Ranks see the
checkout in build/ and this repository's tests/; the temporary directory shared by the worlds holds
the one-rank runs that they are compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKOUT = REPOSITORY / "build" / "Megatron-LM"
QUIET = ("-q", "-W", "ignore")
STAGES = {
    "one rank": ("pytest", *QUIET, "tests/unit_tests"),
    "2, 4 and 8 ranks": ("tests.ranks", "2,4,8", *QUIET, "tests/unit_tests"),
    "tools": ("pytest", *QUIET, "tests/tools"),
    "whole runs": ("pytest", *QUIET, "tests/e2e"),
}
PASSED = (0, 5)
"""Exit codes of pytest: the other is that there was no such test."""


def main(arguments: list[str]) -> int:
    """Run all stages; what the first says is shown at once, of the others when they have ended.

    Returns 0 if all passed.
    """
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared:
        environment = os.environ | {
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{REPOSITORY}",
            "ONE_RANK_RUNS": shared,
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled, Megatron starts a fifth faster
        begun = {}
        for name, module in STAGES.items():
            command = [sys.executable, "-W", "ignore", "-m", *module, *arguments]
            said = Path(shared, f"{name}.log").open("w+") if begun else None
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=said, stderr=said
            )
            begun[name] = process, said
        failed = []
        for name, (process, said) in begun.items():
            print(f"\n===== {name}", flush=True)
            if process.wait() not in PASSED:
                failed.append(name)
            if said:
                said.seek(0)
                print(said.read(), flush=True)
    print(f"\n===== {'failed: ' + ', '.join(failed) if failed else 'all stages passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
