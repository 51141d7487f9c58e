# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint with the best score is kept beside the newest."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.loop.best import best_of
from examples.mimo.nemotron_vlm.loop.forward_step import SCORES
from megatron.training import training as loop
from megatron.training.global_vars import get_args
from tests.e2e.test_faults import assert_whole
from tests.unit_tests.examples.nemotron_vlm.loop.test_saves import (
    PLACES,
    SAVES,
    failing,
    wait_for_deletions,
)
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import trajectory
from tests.unit_tests.test_utilities import Utils, requires_world_size


@requires_world_size(2)
class TestTheBest:
    """Losses of evaluations are made up: 3, 1, 2, 1.5 and, where the run goes on, 0.5."""

    LOSSES = 3.0, 1.0, 2.0, 1.5, 0.5
    KEEPS = ("--keep-best", "eval_loss", "--eval-interval", "1", "--eval-iters", "1")
    KEEPS += ("--save-retain-interval", "100")

    def steps(self, folder: Path, monkeypatch, steps: int, *options: str) -> list[str]:
        def evaluated(*arguments, **named):
            loss = torch.tensor(self.LOSSES[get_args().curr_iteration])
            scores = dict.fromkeys(SCORES.values(), loss)
            return (scores if Utils.rank == Utils.world_size - 1 else {}), None, False

        monkeypatch.setattr(loop, "evaluate", evaluated)
        trajectory(*SAVES, str(folder), *self.KEEPS, *options, steps=steps)
        wait_for_deletions()
        return sorted(path.name[5:].lstrip("0") for path in folder.glob("iter_*"))

    def test_is_kept_beside_the_newest_until_a_better_one(self, shared_path, monkeypatch):
        assert self.steps(shared_path, monkeypatch, 4) == ["2", "4"]
        assert best_of(shared_path).name == "iter_0000002"
        assert_whole(best_of(shared_path), ranks=2)
        dist.barrier()
        goes_on = "--load", str(shared_path)
        assert self.steps(shared_path, monkeypatch, 5, *goes_on) == ["2", "5"]
        assert json.loads((shared_path / "best.json").read_text()) == {"step": 5, "eval_loss": 0.5}
        dist.barrier()

    def test_is_none_where_its_save_failed(self, shared_path, monkeypatch):
        place = PLACES["a rank's tensors"]
        monkeypatch.setattr(place.owner, place.name, failing(getattr(*place[:2]), place, 2))
        assert self.steps(shared_path, monkeypatch, 3) == ["3"]
        assert best_of(shared_path).name == "iter_0000003"
        dist.barrier()
