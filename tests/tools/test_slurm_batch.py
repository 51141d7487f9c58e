# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The batch of rows for nodes: the program takes each, and how its script is called."""

import os
import subprocess

import pytest

from examples.mimo.nemotron_vlm.options.run import Run
from mini import REPOSITORY
from tests.slurm.rows_on_nodes import rows
from tests.unit_tests.examples.nemotron_vlm.loop.models import MODELS
from tests.unit_tests.examples.nemotron_vlm.loop.rows_on_gpus import COMPARED_WITH


def test_the_program_takes_every_row():
    """The rows of CPU ranks have tests that run them."""
    found = [row for group in rows("cuda").values() for row in group]
    assert {row.ranks for row in found} == {1, 2, 4, 8}
    for row in {*found, *COMPARED_WITH.values()}:
        for command in row.commands:
            assert Run.of([*command, "--device", "cuda"], row.ranks).layouts, row
    for row in [row for group in rows("cpu").values() for row in group]:
        assert MODELS[row.model].source is None and "{" not in str(row.commands)


@pytest.mark.parametrize(
    ("folder", "arguments", "says"),
    [
        (REPOSITORY, [], "usage: e2e_batch.sh OUT"),
        (REPOSITORY, ["--once"], "usage: e2e_batch.sh OUT"),
        ("/", ["out"], "error: / is not the repository: submit from there"),
    ],
)
def test_usage(folder, arguments, says):
    script = [REPOSITORY / "tools/slurm/e2e_batch.sh", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True, env=kept)
    assert (done.returncode, done.stderr[: len(says)]) == (2, says)
