# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A lane of tests ends when it stands still, not by the clock, and prints what failed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.run import ALL_BEGUN, _stage
from tests.unit_tests import watchdog

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = """
import time, pytest
pytestmark = pytest.mark.world_size(2)
def test_fails(): assert False, "the first reason"
def test_works():
    end = time.process_time() + 1.5
    while time.process_time() < end: sum(range(10000))
def test_stands_still(): time.sleep(600)
def test_fails_after_it(): assert False, "the last reason"
"""
LIMITS = (
    "from tests.unit_tests import watchdog\n"
    "watchdog.STILL_S, watchdog.LOOK_S, watchdog.LEAST_S = 3.0, 0.5, 0.05\n"
    "from tests.unit_tests.conftest import *\n"
)


def test_a_stage_prints_what_failed_and_goes_on_after_a_hang(tmp_path):
    """Each test runs once, also after one that ended the process."""
    cases = tmp_path / "tests/unit_tests"
    cases.mkdir(parents=True)
    (cases / "conftest.py").write_text(LIMITS)
    (cases / "test_cases.py").write_text(CASES)
    command = f"{sys.executable} -W ignore -m tests.ranks 2 -q --tb=no -p tests.conftest".split()
    environment = {
        name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ
    }
    begun, said = tmp_path / "begun", tmp_path / "said"
    with said.open("w") as file:
        assert _stage([*command, "--rootdir", str(tmp_path), str(cases)], environment, begun, file)
    text, lines = said.read_text(), begun.read_text().splitlines()
    assert len(lines) == 5 and lines[-1] == ALL_BEGUN and len(set(lines)) == 5, text
    assert "the first reason" in text and "the last reason" in text
    assert "test_stands_still: no rank has worked for 3 s" in text
    assert "test_works: " not in text and "nanobind" not in text


def test_work_of_another_process_of_the_run_is_progress(monkeypatch):
    monkeypatch.setattr(watchdog, "STILL_S", 2.0)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.2)
    monkeypatch.setattr(watchdog, "LEAST_S", 0.05)
    ended: list[str] = []
    works = "import time\nwhile time.process_time() < 2: pass"
    with watchdog.watched(ended.append, None):
        subprocess.run([sys.executable, "-c", works], check=True)
    assert not ended


def test_work_without_an_end_has_a_limit(monkeypatch):
    monkeypatch.setattr(watchdog, "MOST_S", 0.5)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)
    ended: list[str] = []
    with watchdog.watched(ended.append, None):
        while not ended:
            sum(range(10000))
    assert "CPU time" in ended[0]
