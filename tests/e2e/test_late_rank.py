# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A rank that does not come to the end of a test shows where it is."""

import os
import subprocess
import sys

from tests.e2e.launch import environment

LATE = """
import time
from datetime import timedelta
from tests.unit_tests import conftest
from tests.unit_tests.test_utilities import Utils, requires_world_size

conftest.COLLECTIVE_TIMEOUT = timedelta(0)

@requires_world_size(2)
def test_late():
    time.sleep(100 * Utils.rank)
"""


def test_the_others_end_the_run_with_its_stack(tmp_path):
    (tmp_path / "test_late.py").write_text(LATE)
    ranks = [sys.executable, "-m", "tests.ranks", "2", "-p", "tests.unit_tests.conftest"]
    done = subprocess.run(
        [*ranks, "test_late.py", "--rootdir=."],
        cwd=tmp_path,
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "ranks [1] did not reach the end of test_late.py::test_late" in done.stderr
    assert f'"{tmp_path}/test_late.py", line 11 in test_late' in done.stderr
