# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--once``: run only the first row of each test that has several rows of parameters.

Every behaviour is then seen once; rows are sorted so that the most demanding comes first. Classes
such as TestFourRanks repeat a test by one name on several numbers of ranks: the first class runs.
Of rows that are marked with what they show, the first of each mark runs.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

_RANKS = re.compile(r"::Test(One|Two|Four|Eight)Ranks?\b")


BEGUN, ALL_BEGUN = "TESTS_BEGUN", "all"
"""Variable of the environment: a file of the tests that have begun; and its line after all."""

BEFORE = frozenset(Path(os.environ[BEGUN]).read_text().splitlines() if BEGUN in os.environ else ())
"""Tests that began in an earlier process; read before ranks are forked, which begin others."""

# Otherwise PyTorch would compile Megatron's small functions for each shape of a test.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Programs set it before they import PyTorch; Megatron's checks ask for it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--once`` and ``--record``."""
    parser.addoption("--once", action="store_true", help="of each test, run the first row only")
    parser.addoption("--record", type=Path, help="write outcomes and figures, a JSON line a test")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of rows; record on the first rank, if asked to."""
    config.addinivalue_line("markers", "shows(what): with --once, the first row of each runs")
    path = config.getoption("record")
    if path and os.environ.get("RANK", "0") == "0":
        config.pluginmanager.register(Recorder(path), "recorder")


REASON = 1500
"""Number of characters recorded from the end of a failure's message."""


class Recorder:
    """Writes a line that names the tests for this number of ranks, and a line for each as it ends.

    A test that never ends is in the first line only. Properties are those that the test recorded
    with ``record_property``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, record: dict) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        marks = {item.nodeid: item.get_closest_marker("world_size") for item in session.items}
        cases = [name for name, mark in marks.items() if not mark or mark.args[0] == ranks]
        self._write({"collected": cases})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        record = {"test": report.nodeid, "outcome": report.outcome}
        record |= {"seconds": round(report.duration, 2), **dict(report.user_properties)}
        if hasattr(report, "wasxfail") and report.skipped:
            record |= {"outcome": "passed", "reason": f"fails as expected: {report.wasxfail}"}
        elif report.skipped:
            record["reason"] = str(report.longrepr[-1])
        elif report.failed:
            record["reason"] = report.longreprtext[-REASON:]
        self._write(record)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, whatever ends the process later."""
    if report.failed:
        rank = f"[rank {os.environ.get('RANK', '0')}] "
        text = f"\n{rank}FAILED {report.nodeid}\n{report.longreprtext}"
        print(text, file=sys.__stderr__, flush=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note a test that begins, for `tests/run.py`."""
    _note(nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Note that all tests have run."""
    if not session.config.option.collectonly:
        _note(ALL_BEGUN)


def _note(line: str) -> None:
    if (path := os.environ.get(BEGUN)) and os.environ.get("RANK", "0") == "0":
        with open(path, "a") as file:
            file.write(f"{line}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that began before the process was ended, and rows if asked to."""
    items[:] = [item for item in items if item.nodeid not in BEFORE]
    if not config.getoption("once"):
        return
    first: dict[tuple, pytest.Item] = {}
    for item in items:
        marker = item.get_closest_marker("shows")
        shown = marker.args if marker else ()
        first.setdefault((_RANKS.sub("", item.nodeid.partition("[")[0]), *shown), item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
