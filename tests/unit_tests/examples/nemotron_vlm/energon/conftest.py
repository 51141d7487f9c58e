# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of digits for the tests of --data energon, made by the tool that users run."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make and survey 84 samples to train in four shards, 12 held out; tests change copies only."""
    from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import make_digits, survey

    path = tmp_path_factory.mktemp("data") / "digits"
    make_digits(path, samples=96, seed=1)
    survey(path)
    return path
