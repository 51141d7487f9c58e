# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A lane of tests goes on after one that hangs, and prints what failed.

The GPU cases can be imported where there is no GPU: a moved name must not wait for one.
"""

import json
import os
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest

from tests.gpu import run
from tests.run import ALL_BEGUN, _stage
from tests.unit_tests.test_utilities import requires_world_size

CASES = sorted(Path(__file__).parents[1].joinpath("gpu").glob("*.py"))
SCRIPTS = ("conftest", "upstream_script")

pytestmark = requires_world_size(1)

PROGRAM = """
import time
def test_fails(): assert False, "the first reason"
def test_stands_still(): time.sleep(600)
def test_never_ends():
    while True: sum(range(10000))
def test_fails_after_it(): assert False, "the last reason"
"""
CONFTEST = """
from tests.unit_tests import conftest
from tests.unit_tests.conftest import pytest_runtest_protocol
conftest.LIMIT_S = 1
"""


def test_a_stage_prints_what_failed_and_goes_on_after_a_hang(tmp_path):
    """Each test runs once, also after one that ended the process."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=no", "--capture=sys"]
    command += ["-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    kept = ("PATH", "PYTHONPATH", "HOME")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    begun, said = tmp_path / "begun", tmp_path / "said"
    with said.open("w") as file:
        assert _stage(command, environment, begun, file)
    text, lines = said.read_text(), begun.read_text().splitlines()
    assert len(lines) == 5 and lines[-1] == ALL_BEGUN and len(set(lines)) == 5, text
    assert "the first reason" in text and "the last reason" in text
    assert text.count("in test_stands_still") == text.count("in test_never_ends") == 1


@pytest.mark.parametrize("name", [path.stem for path in CASES if path.stem not in SCRIPTS])
def test_cases_can_be_imported(name):
    assert import_module(f"tests.gpu.{name}")


@pytest.mark.parametrize("error", ["", "OSError: no lib.so"], ids=["all", "broken"])
def test_a_library_that_cannot_be_imported_is_named(error, tmp_path, monkeypatch):
    code = "raise OSError('no\\nlib.so')" if error else ""
    (tmp_path / "kernels_of_a_test.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    wanted = f"kernels_of_a_test: {error}" if error else ""
    assert run.lacking(["json", "kernels_of_a_test"]) == wanted


def test_cases_are_written_as_they_end_and_a_signal_ends_a_stages_ranks(tmp_path, monkeypatch):
    lines = ['{"collected": ["a", "b"]}', '{"test": "a", "outcome": "passed"}']
    rank = tmp_path / "rank"  # in a session of its own, as torchrun's
    started = f"setsid sh -c 'echo $$ > {rank}; exec sleep 60' & trap 'kill $!; wait; exit' TERM"
    told = f"printf '%s\\n' '{lines[0]}' '{lines[1]}' > $0; wait"
    command = ["sh", "-c", f"{started}; {told}"]
    monkeypatch.setattr(run.Stage, "command", lambda _, record, __: [*command, str(record)])
    stages = [run.Stage(name, 1, ("tests",)) for name in ("first", "next")]
    for name, value in {
        "lanes": lambda ranks: [stages],
        "lacking": lambda names: "",
        "machine": dict,
        "codes": {},
        "ending": threading.Event(),
        "WRITTEN_S": 0.1,
    }.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    written, seen = tmp_path / "gpu.json", []

    def end() -> None:
        while not (rank.exists() and written.exists() and outcomes(written)):
            time.sleep(0.05)
        seen.append(outcomes(written))
        run._end()

    threading.Thread(target=end).start()
    assert run.main(["--json", str(written)]) == 1
    assert seen == [outcomes(written)] == [{"a": "passed", "b": "missing"}]
    assert not Path("/proc", rank.read_text().strip()).exists()


def test_a_stage_without_a_chosen_case_has_not_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "codes", {})
    for name, arguments in (("chosen", ["-k", "nothing"]), ("refused", ["--no-such-option"])):
        stage = run.Stage(name, 1, (run.ON_ONE[0],))
        run._run([stage], arguments, 1, {"ONE_RANK_RUNS": str(tmp_path)})
        assert len(run._cases(stage, tmp_path)) == (name == "refused")


def outcomes(written: Path) -> dict[str, str]:
    """The cases of a JSON and their outcomes."""
    return {case["test"]: case["outcome"] for case in json.loads(written.read_text())["cases"]}
