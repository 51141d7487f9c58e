# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The GPU cases can be imported where there is no GPU: a moved name must not wait for one. Without
a library that they need, their run ends at once.
"""

import os
import threading
from importlib import import_module
from pathlib import Path

import pytest

from tests.gpu import run
from tests.unit_tests.test_utilities import requires_world_size

CASES = sorted(Path(__file__).parents[1].joinpath("gpu").glob("*.py"))
SCRIPTS = ("conftest", "upstream_script")

pytestmark = requires_world_size(1)


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


def test_a_signal_ends_a_stage_and_keeps_its_cases(tmp_path, monkeypatch):
    record = tmp_path / "stage.jsonl"
    monkeypatch.setattr(run, "ending", threading.Event())
    lines = ['{"collected": ["a", "b"]}', '{"test": "a", "outcome": "passed"}']
    command = ["sh", "-c", f"printf '%s\\n' '{lines[0]}' '{lines[1]}' > {record}; sleep 60"]
    monkeypatch.setattr(run.Stage, "command", lambda *_: command)
    stage = run.Stage("stage", 1, ("tests",))

    def end() -> None:
        while not record.exists() or record.read_text().count("\n") < 2:
            pass
        run._end()

    threading.Thread(target=end).start()
    cases = run._run([stage, stage], [], 1, {"ONE_RANK_RUNS": str(tmp_path)})
    outcomes = {case["test"]: case["outcome"] for case in cases}
    assert outcomes == {"a": "passed", "b": "missing"} and len(cases) == 2
