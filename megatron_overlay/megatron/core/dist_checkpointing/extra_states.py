# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Load checkpoints that lack extra states of modules, and none whose extra states would run code.

Each Transformer Engine layer has an extra state beside its weights, for resuming FP8. Layers of
other implementations have none, and a converted checkpoint has only weights.
"""

import contextlib
import io
import pickle
from typing import Any

import torch

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.safe_globals import SafeUnpickler


def keep_unsaved_extra_states(
    sharded_state_dict: ShardedStateDict, checkpoint_dir: str
) -> ShardedStateDict:
    """Drop extra states that a checkpoint lacks from a load request; modules keep their own.

    Weights that the checkpoint lacks are still requested, so loading them fails.
    """
    saved = load_sharded_metadata(checkpoint_dir)

    def kept(value: Any) -> Any:
        if not (isinstance(value, ShardedObject) and value.key.endswith("_extra_state")):
            return value
        if value.unique_key not in saved:
            return LocalNonpersistentObject(value.data)
        return ShardedTensorFactory(
            value.key, value.data, lambda *_: value, _without_code, value.replica_id
        )

    return dict_list_map_outplace(kept, sharded_state_dict)


def _without_code(state: Any) -> Any:
    """Return an extra state, which Transformer Engine will unpickle whatever is in it.

    Raises:
        CheckpointingException: it names something else than recipes and tensors.
    """
    if isinstance(state, torch.Tensor) and state.numel():
        try:
            with contextlib.suppress(ImportError):  # no Transformer Engine, and none to unpickle it
                SafeUnpickler(io.BytesIO(state.cpu().numpy().tobytes())).load()
        except pickle.UnpicklingError as error:
            raise CheckpointingException(f"an extra state is refused: {error}") from error
    return state
