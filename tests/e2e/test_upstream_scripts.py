# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's scripts record the same numbers on an applied tree as on a pristine one, bit for bit.

The scripts are in git checkouts only: see ``upstream_world.py``.
"""

import tomllib
from pathlib import Path

import pytest

from tests.e2e.upstream_world import Scalars

SCRIPTS = tomllib.loads((Path(__file__).parent / "upstream_scripts/runs.toml").read_text())
STEPS = 4
END_OF_LOG = 4000  # characters


RUNS = [(script, run) for script in ("mimo", "hybrid", "gpt") for run in SCRIPTS[script]["runs"]]


@pytest.mark.parametrize(
    ("script", "run"),
    RUNS,
    ids=[f"{script} {run['name']}".replace(" ", "-") for script, run in RUNS],
)
def test_all_that_megatron_records(script, run, pristine, applied, tmp_path):
    worlds = [pristine, applied]
    options = " ".join((SCRIPTS["common"], SCRIPTS[script]["options"], run["options"])).split()
    resumed = run.get("resumed", False)

    def record(part: str, extra: list[list[str]]) -> list[Scalars]:
        for number, world in enumerate(worlds):
            command = [SCRIPTS[script]["script"], *options, *extra[number]]
            world.start(run["ranks"], command, tmp_path / part / str(number))
        for status, log in [world.wait() for world in worlds]:
            assert status == 0, log[-END_OF_LOG:]
        return [world.scalars() for world in worlds]

    saved = [str(tmp_path / f"checkpoints-{number}") for number in range(len(worlds))]
    saving = [["--save", path, "--save-interval", "2"] if resumed else [] for path in saved]
    before, after = record("whole", saving)
    assert len({loss for _, loss in before["lm loss"]}) == STEPS  # it trains
    assert after == before
    if resumed:
        second_half = {tag: [v for v in values if v[0] > 2] for tag, values in before.items()}
        loading = [["--load", path, "--ckpt-step", "2"] for path in reversed(saved)]
        assert record("resumed", loading) == [second_half, second_half]
