# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A lane of tests ends when it stands still, not by the clock, and prints what failed."""

import os
import sys

from tests.run import ALL_BEGUN, _stage

CASES = """
import time
def test_fails(): assert False, "the first reason"
def test_works():
    end = time.process_time() + 1.5
    while time.process_time() < end: sum(range(10000))
def test_stands_still(): time.sleep(600)
def test_never_ends():
    while True: sum(range(10000))
def test_fails_after_it(): assert False, "the last reason"
"""
CONFTEST = """
import os, sys, pytest
from tests.unit_tests import watchdog
watchdog.STILL_S, watchdog.LOOK_S, watchdog.LEAST_S, watchdog.MOST_S = 1.0, 0.2, 0.05, 3.0
def end(reason):
    print(reason, file=sys.__stderr__, flush=True)
    os._exit(70)
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    with watchdog.watched(lambda reason: end(f"{item.name}: {reason}"), None):
        return (yield)
"""


def test_a_stage_prints_what_failed_and_goes_on_after_a_hang(tmp_path):
    """Each test runs once, also after one that ended the process."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=no", "--capture=sys"]
    command += ["-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    kept = ("PATH", "PYTHONPATH", "HOME")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    begun, said = tmp_path / "begun", tmp_path / "said"
    with said.open("w") as file:
        assert _stage(command, environment, begun, file)
    text, lines = said.read_text(), begun.read_text().splitlines()
    assert len(lines) == 6 and lines[-1] == ALL_BEGUN and len(set(lines)) == 6, text
    assert "the first reason" in text and "the last reason" in text
    assert "test_stands_still: no rank has worked for 1 s" in text
    assert "test_never_ends: it has worked for over 3 s of CPU time" in text
    assert "test_works: " not in text
