# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run every test: the plain ones in one process, then each world size once, under torchrun.

    tests/run.py [pytest arguments]      e.g. tests/run.py -k layout

Ranks see the checkout in build/ and this repository's tests/; the temporary directory shared by
the worlds holds the one-rank runs that they are compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKOUT = REPOSITORY / "build" / "Megatron-LM"
WORLDS = (2, 4, 8)
NO_TESTS = 5


def main(arguments: list[str]) -> int:
    """Run the stages one after the other; returns 0 if all passed."""
    failed = []
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared:
        environment = os.environ | {
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{REPOSITORY}",
            "ONE_RANK_RUNS": shared,
            "OMP_NUM_THREADS": "1",
        }
        for name, command in _stages(arguments):
            print(f"\n===== {name}", flush=True)
            code = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
            if code not in (0, NO_TESTS):
                failed.append(name)
    print(f"\n===== {'failed: ' + ', '.join(failed) if failed else 'all stages passed'}")
    return 1 if failed else 0


def _stages(arguments: list[str]) -> list[tuple[str, list[str]]]:
    python = sys.executable
    pytest = ["-m", "pytest", "-q", "-W", "ignore", *arguments]
    stages = [("one process", [python, *pytest, "tests"])]
    for size in WORLDS:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        chosen = [*pytest, "tests/unit_tests"]
        stages.append((f"{size} ranks", [python, *torchrun, *chosen]))
    return stages


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
