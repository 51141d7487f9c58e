# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's scripts record the same numbers on an applied tree as on a pristine one, bit for bit.

The scripts are in git checkouts only: see ``git_checkout.py``.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from upstream_world import Scalars, UpstreamWorld

SCRIPTS = tomllib.loads((Path(__file__).parent / "upstream_scripts/runs.toml").read_text())
STEPS = 4
END_OF_LOG = 4000  # characters


def runs(script: str) -> pytest.MarkDecorator:
    rows = SCRIPTS[script]["runs"]
    return pytest.mark.parametrize("run", rows, ids=[row["name"].replace(" ", "-") for row in rows])


def check(script: str, run: dict[str, Any], worlds: list[UpstreamWorld], folder: Path) -> None:
    """Compare all that Megatron records; `worlds` are a pristine and an applied tree's."""
    options = " ".join((SCRIPTS["common"], SCRIPTS[script]["options"], run["options"])).split()
    resumed = run.get("resumed", False)

    def record(part: str, extra: list[list[str]]) -> list[Scalars]:
        for number, world in enumerate(worlds):
            command = [SCRIPTS[script]["script"], *options, *extra[number]]
            world.start(run["ranks"], command, folder / part / str(number))
        for status, log in [world.wait() for world in worlds]:
            assert status == 0, log[-END_OF_LOG:]
        return [world.scalars() for world in worlds]

    saved = [str(folder / f"checkpoints-{number}") for number in range(len(worlds))]
    saving = [["--save", path, "--save-interval", "2"] if resumed else [] for path in saved]
    before, after = record("whole", saving)
    assert len({loss for _, loss in before["lm loss"]}) == STEPS  # it trains
    assert after == before
    if resumed:
        second_half = {tag: [v for v in values if v[0] > 2] for tag, values in before.items()}
        loading = [["--load", path, "--ckpt-step", "2"] for path in reversed(saved)]
        assert record("resumed", loading) == [second_half, second_half]


@runs("gpt")
def test_pretrain_gpt(run, pristine, applied, tmp_path):
    check("gpt", run, [pristine, applied], tmp_path)


@runs("hybrid")
def test_pretrain_hybrid(run, pristine, applied, tmp_path):
    check("hybrid", run, [pristine, applied], tmp_path)


@runs("mimo")
def test_pretrain_mimo_as_upstream_places_its_modules(run, pristine, applied, tmp_path):
    check("mimo", run, [pristine, applied], tmp_path)
