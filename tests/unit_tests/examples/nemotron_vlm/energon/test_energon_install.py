# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The extra that --data energon needs, and the tool that makes a data set for it."""

import importlib
import importlib.util

import pytest

import examples.mimo.nemotron_vlm.energon as package
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import tool


def test_a_missing_package_is_refused_with_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if "energon" not in name else None
    )
    with pytest.raises(ImportError, match=r"needs megatron.energon; .* pip install '.\[energon\]'"):
        importlib.reload(package)


def test_the_tool_does_not_write_over_data(digits, capsys):
    assert tool().main([str(digits), "--samples", "8", "--seed", "0"]) == 2
    assert "is there already" in capsys.readouterr().err
