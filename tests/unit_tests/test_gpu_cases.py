# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The GPU cases can be imported where there is no GPU: a moved name must not wait for one. Without
a library that they need, their run ends at once.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.gpu import run
from tests.unit_tests.test_utilities import requires_world_size

CASES = sorted(Path(__file__).parents[1].joinpath("gpu").glob("test_*.py"))


@requires_world_size(1)
@pytest.mark.parametrize("name", [path.stem for path in CASES])
def test_cases_can_be_imported(name):
    assert import_module(f"tests.gpu.{name}")


@requires_world_size(1)
@pytest.mark.parametrize("error", ["", "raise OSError('no\\nlib.so')"], ids=["all", "broken"])
def test_a_library_that_cannot_be_imported_ends_the_run_at_once(
    error, tmp_path, monkeypatch, capsys
):
    (tmp_path / "kernels_of_a_test.py").write_text(error)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(run, "LIBRARIES", ["json", "kernels_of_a_test"])
    passed = {"stage": "", "test": "", "outcome": "passed"}
    ran = []
    monkeypatch.setattr(run, "_run", lambda *lane: ran.append(lane) or [passed])
    status, said = run.main([]), capsys.readouterr().err
    if not error:
        assert (status, said) == (0, "") and ran
        return
    assert status == 2 and not ran
    assert said == f"error: {sys.executable} cannot import kernels_of_a_test: OSError: no lib.so\n"
