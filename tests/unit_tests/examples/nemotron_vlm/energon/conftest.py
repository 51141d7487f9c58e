# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of digits for the tests of --data energon, made by the tool that users run."""

import shutil
from pathlib import Path

import pytest

from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.records import kind_of
from examples.mimo.nemotron_vlm.energon.store import DataSet
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make and survey 84 samples to train in four shards, 12 held out; tests change copies only."""
    path = tmp_path_factory.mktemp("data") / "digits"
    digits_data.make_digits(path, samples=96, seed=1)
    digits_data.survey(path)
    return path


@pytest.fixture
def copied(digits, tmp_path) -> Path:
    """A copy of the data set without survey."""
    surveys = shutil.ignore_patterns("survey*")
    return shutil.copytree(digits, tmp_path / "copy", ignore=surveys)


@pytest.fixture(scope="module")
def omni_shards(tmp_path_factory) -> Path:
    """84 lines of text, tones, clips, or several of them, to train, and 12 held out."""
    path = tmp_path_factory.mktemp("data") / "omni"
    digits_data.make_digits(path, 96, 1, "--tasks", "omni")
    digits_data.survey(path, makes=[digits_data.omni])
    return path


@pytest.fixture
def reads(monkeypatch) -> list[tuple[str, list[str]]]:
    """Record the samples that data sets read in the test, and which of their files of media."""
    seen, read = [], DataSet.raw

    def recorded(dataset: DataSet, index: int, *more, **kinds) -> dict[str, bytes]:
        seen.append((dataset.name(index), []))
        raw = read(dataset, index, *more, **kinds)
        seen[-1][1].extend(name for name in raw if kind_of(name) and raw[name])
        return raw

    monkeypatch.setattr(DataSet, "raw", recorded)
    return seen


@pytest.fixture
def surveyed(copied, capsys):
    """Survey the copy with the tool; return what it prints."""

    def survey_and_print(*options: str) -> str:
        more = ["--tokenizer-model", str(copied / "tokenizer"), "--names", "50", *options]
        assert main([str(copied), *more]) == 0
        return capsys.readouterr().out

    return survey_and_print
