# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Extra states that a checkpoint has or lacks."""

import torch
from torch.distributed.checkpoint import save

from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.extra_states import keep_unsaved_extra_states


def test_only_an_extra_state_that_was_not_saved_is_the_modules_own(tmp_path):
    def extra(name):
        return ShardedObject(f"{name}._extra_state", torch.ones(1), (1,), (0,))

    save({extra("saved").unique_key: "scales"}, checkpoint_id=tmp_path, no_dist=True)
    save_config(CheckpointingConfig("torch_dist", 1), str(tmp_path))
    asked = {
        "saved": extra("saved"),
        "missing": [extra("missing")],
        "weight": ShardedTensor.from_rank_offsets("missing.weight", torch.ones(3)),
        "object": ShardedObject("missing.object", None, (1,), (0,)),
    }
    kept = keep_unsaved_extra_states(asked, str(tmp_path))
    (own,) = kept.pop("missing")
    assert isinstance(own, LocalNonpersistentObject)
    assert own.unwrap() is asked.pop("missing")[0].data
    assert kept == asked
