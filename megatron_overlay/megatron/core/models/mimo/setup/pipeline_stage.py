# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Position of a colocated MimoModel's rank in the language model's pipeline."""

from dataclasses import replace

from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY, ModuleLayout, RankRole


def role_with_pipeline(role: RankRole, config: MimoModelConfig) -> RankRole:
    """Tell a rank's role whether its (virtual) stage of the language model is the first.

    Upstream's role of a colocated rank assumes that the rank holds every module whole.

    Args:
        role: result of ``RankRole.build``; changed in place if the modules are colocated.
    """
    if role.mode is ModuleLayout.COLOCATED and config.module_to_grid_map:
        grid = config.module_to_grid_map[MIMO_LANGUAGE_MODULE_KEY]
        stage = grid.get_pg("pp").rank() if "pp" in grid.dim_names else 0
        is_first = stage == 0 and not config.language_model_spec.params.get("vp_stage")
        whole = role.modules[MIMO_LANGUAGE_MODULE_KEY]
        role.modules[MIMO_LANGUAGE_MODULE_KEY] = replace(whole, is_first_stage=is_first)
    return role
