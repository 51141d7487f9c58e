# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Load checkpoints that lack extra states of modules.

Each Transformer Engine layer has an extra state beside its weights, for resuming FP8. Layers of
other implementations have none, and a converted checkpoint has only weights.
"""

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
    """Drop extra states that a checkpoint lacks from a load request; modules keep their own.

    Weights that the checkpoint lacks are still requested, so loading them fails.
    """
    saved = load_sharded_metadata(checkpoint_dir)

    def kept(value: Any) -> Any:
        is_extra = isinstance(value, ShardedObject) and value.key.endswith("_extra_state")
        if is_extra and value.unique_key not in saved:
            return LocalNonpersistentObject(value.data)
        return value

    return dict_list_map_outplace(kept, sharded_state_dict)
