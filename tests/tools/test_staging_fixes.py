# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tests of fixes for upstream fail on upstream's tree and pass on ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mini import REPOSITORY, run
from overlay.fetch import fetch
from overlay.patchset import PatchSet
from staging.features import Features

FEATURES = Features(PatchSet(REPOSITORY))
FIXES = REPOSITORY / "tools/staging/fix_tests"
FAILS = sorted(feature.fails for feature in FEATURES.all() if feature.fails)

# Upstream's training loop needs Python 3.12 for this one name only.
PROGRAM = """
import sys, typing, typing_extensions, pytest
typing.override = typing_extensions.override
sys.exit(pytest.main(sys.argv[1:]))
"""


def failing(checkout: Path, files: list[str]) -> list[str]:
    """Return those of the fixes' test files in which a test fails on a checkout."""
    options = ["-q", "-rfE", "--tb=no", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"]
    options += ["-c", os.devnull, "--rootdir", str(FIXES), *(str(FIXES / path) for path in files)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options],
        cwd=FIXES,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return sorted(set(re.findall(r"^FAILED (?:.*fix_tests/)?(\S+?)::", done.stdout, re.MULTILINE)))


@pytest.mark.parametrize("files", [FAILS[1:3], FAILS[:1] + FAILS[3:]], ids=["two", "others"])
def test_fixes_are_needed_and_work(tmp_path, files):
    lock, checkout = FEATURES.patchset.lock, tmp_path / "checkout"
    fetch(lock, REPOSITORY, checkout, lock.pin, None)
    assert failing(checkout, files) == files
    assert run("apply", checkout).code == 0
    assert failing(checkout, files) == []
