# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Position of a colocated MimoModel's rank in the language model's pipeline."""

from __future__ import annotations

import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.models.mimo.config.role import (
    MIMO_LANGUAGE_MODULE_KEY,
    ModuleLayout,
    ModuleStageInfo,
    RankRole,
)


def stage_position(
    grid: HyperCommGrid, rank: int, vp_stage: int | None = None, vp_size: int | None = None
) -> ModuleStageInfo:
    """Whether a rank's (virtual) stage is the first of a module's pipeline, and the last.

    Needs no process group.

    Args:
        grid: the module's grid; without ``pp`` the pipeline has one stage.
        rank: global rank, in the grid.
        vp_stage, vp_size: index and number of the rank's virtual stages.
    """
    stage, stages = 0, 1
    if "pp" in grid.dim_names:
        (pipeline,) = (ranks for ranks in grid.get_rank_enum("pp") if rank in ranks)
        stage, stages = pipeline.index(rank), len(pipeline)
    return ModuleStageInfo(
        is_first_stage=stage == 0 and not vp_stage,
        is_last_stage=stage == stages - 1 and (vp_stage or 0) == (vp_size or 1) - 1,
    )


def role_with_pipeline(role: RankRole, config: MimoModelConfig) -> RankRole:
    """Add this rank's position in the language model's pipeline to its role.

    Upstream's role of a colocated rank assumes that the rank holds every module whole.

    Args:
        role: result of ``RankRole.build``; changed in place if the modules are colocated.
        config: the model's configuration.
    """
    if role.mode is ModuleLayout.COLOCATED and config.module_to_grid_map:
        language = config.language_model_spec.params
        role.modules[MIMO_LANGUAGE_MODULE_KEY] = stage_position(
            config.module_to_grid_map[MIMO_LANGUAGE_MODULE_KEY],
            dist.get_rank(),
            language.get("vp_stage"),
            language["config"].virtual_pipeline_model_parallel_size,
        )
    return role
