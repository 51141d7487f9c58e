# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The cases of a Slurm batch against the program that they run."""

import sys

import pytest

from mini import REPOSITORY

pytest.importorskip("megatron.core.models.mimo.comm", reason="needs the applied checkout")
from megatron.core import cpu_runtime  # noqa: E402

sys.path.insert(0, str(REPOSITORY / "tools" / "slurm"))
from e2e_cases import read_cases  # noqa: E402


@pytest.mark.parametrize("name", ["cases.toml", "many_gpus.toml"])
def test_the_program_takes_every_case(name, tmp_path):
    cpu_runtime.install()
    from examples.mimo.nemotron_vlm.options.arguments import parse

    for case in read_cases(REPOSITORY / "tools" / "slurm" / name):
        assert parse(case.command_line(tmp_path), case.ranks).layouts, case.name
