# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks know their stage of the language model's pipeline when modules are colocated."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config.role import (
    MIMO_LANGUAGE_MODULE_KEY,
    ModuleLayout,
    ModuleStageInfo,
    RankRole,
)
from megatron.core.models.mimo.setup.pipeline_stage import role_with_pipeline, stage_position

DIMS = ["tp", "cp", "dp", "pp"]


@pytest.fixture
def grids(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    return {
        "images": HyperCommGrid([4, 1, 2, 1], DIMS),
        MIMO_LANGUAGE_MODULE_KEY: HyperCommGrid([1, 2, 2, 2], DIMS),
    }


def role_of(rank: int, grids, monkeypatch, vp_stage=None, vp_size=None) -> RankRole:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    language = SimpleNamespace(virtual_pipeline_model_parallel_size=vp_size)
    config = SimpleNamespace(
        module_to_grid_map=grids,
        language_model_spec=SimpleNamespace(params={"config": language, "vp_stage": vp_stage}),
    )
    return role_with_pipeline(RankRole.build(["images"], grids), config)


@pytest.mark.parametrize(
    ("rank", "vp_stage", "expected"),
    [
        *((rank, None, (rank < 4, rank >= 4)) for rank in range(8)),  # pp is the slowest
        (0, 0, (True, False)),
        (0, 1, (False, False)),
        (4, 0, (False, False)),
        (4, 1, (False, True)),
    ],
)
def test_stages_come_from_the_language_models_grid(rank, vp_stage, expected, grids, monkeypatch):
    role = role_of(rank, grids, monkeypatch, vp_stage, None if vp_stage is None else 2)
    assert role.mode is ModuleLayout.COLOCATED
    assert role.modules[MIMO_LANGUAGE_MODULE_KEY] == ModuleStageInfo(*expected)
    assert role.modules["images"] == ModuleStageInfo(True, True)


def test_without_grids_or_pp_there_is_one_stage(monkeypatch):
    role = role_of(3, None, monkeypatch)
    assert role.modules[MIMO_LANGUAGE_MODULE_KEY] == ModuleStageInfo(True, True)
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = HyperCommGrid([2, 4], ["tp", "dp"])
    assert stage_position(grid, 5) == ModuleStageInfo(True, True)
