# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Trials of features: each is staged alone, and its tests run in that tree."""

import os
import re
import subprocess
import sys
from pathlib import Path

from overlay.cli import REPOSITORY
from staging.features import Feature
from staging.stage import Staging

LOGS = REPOSITORY / "build/staging"
_COUNTS = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in ", re.MULTILINE)


def try_each(staging: Staging, wanted: list[Feature]) -> bool:
    """Stage each feature on those it needs, run its tests there as its description says, and print
    a line for each number of ranks; return whether tests passed and none failed.

    Raises:
        OverlayError: a feature cannot be staged.
    """
    passed = True
    LOGS.mkdir(parents=True, exist_ok=True)
    # Nothing of this repository is on the path.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    for feature in wanted:
        with staging.worktree() as tree:
            for one in staging.features.stack(feature.name):
                staging.commit(one, tree)
            for ranks, command in staging.features.commands(feature).items():
                log = LOGS / f"{feature.name}-{ranks}.log"
                with log.open("w") as output:
                    code = subprocess.run(
                        ["bash", "-ec", command],
                        cwd=tree,
                        env=kept | {"PATH": path},
                        stdout=output,
                        stderr=output,
                    ).returncode
                counts = ["no tests", *_COUNTS.findall(log.read_text(errors="replace"))][-1]
                works = code == 0 and " passed" in counts
                says = counts if works else f"FAILED: {counts}: {log}"
                print(f"{feature.name} on {ranks} ranks: {says}", flush=True)
                passed = passed and works
    return passed
