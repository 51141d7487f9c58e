# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Extra states of modules that a checkpoint lacks.

Each layer of Transformer Engine has an extra state beside its weights, what FP8 needs to go on.
Layers of other implementations have none, and a converted checkpoint has weights alone.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata


def keep_unsaved_extra_states(
    sharded_state_dict: ShardedStateDict, checkpoint_dir: str
) -> ShardedStateDict:
    """Ask a checkpoint for no extra state that it lacks: the module keeps its own.

    Weights that it lacks are still asked for, and missed when they are read.

    Args:
        sharded_state_dict: what is to be loaded.
        checkpoint_dir: of one iteration.

    Returns:
        The same, with the module's own value in place of each such state.
    """
    saved = load_sharded_metadata(checkpoint_dir)

    def kept(value: Any) -> Any:
        is_extra = isinstance(value, ShardedObject) and value.key.endswith("_extra_state")
        if is_extra and value.unique_key not in saved:
            return LocalNonpersistentObject(value.data)
        return value

    return dict_list_map_outplace(kept, sharded_state_dict)
