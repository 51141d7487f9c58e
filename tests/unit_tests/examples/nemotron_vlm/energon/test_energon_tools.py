# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The packages that --data energon needs, and the tools that make data, are tested here."""

import importlib
import os
import sys
from pathlib import Path

import pytest

import examples.mimo.nemotron_vlm.energon as package
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.energon.__main__ import main
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import make_webdataset
from tests.unit_tests.examples.nemotron_vlm.runs import options_of


def test_a_missing_package_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.energon", None)
    with pytest.raises(ImportError, match=r"needs megatron.energon; .* pip install '.\[energon\]'"):
        importlib.reload(package)


def test_the_tool_does_not_write_over_data(digits, capsys):
    assert make_webdataset.main([str(digits), "--samples", "8", "--seed", "0"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_the_benchs_mixture_opens(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(make_webdataset.__file__).parents[1] / "bench")
    model, mixture = ["--model", "tiny-omni"], importlib.import_module("mixture")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # no process of its own
    monkeypatch.setattr(mixture.subprocess, "run", lambda line, check: main(line[2:]))
    made = mixture.make(tmp_path / "mixture", 32, model)
    sizes = ("--dynamic-resolution", "--seq-length", "99968", "--vocab-size", "1024")
    run = options_of(*model, *made, *sizes)
    opened = make_source(run.args, run.preset)
    assert opened.epoch_size("train") == 32 and not opened.left_out("train")
