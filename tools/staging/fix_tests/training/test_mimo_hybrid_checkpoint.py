# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a MimoModel: extra states that one has or lacks, and a hybrid language model's."""

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import save

from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.extra_states import keep_unsaved_extra_states
from megatron.core.models.mimo.model.base import MimoModel
from megatron.training.checkpointing import _maybe_setup_gpt_to_hybrid_load


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
    saved = kept.pop("saved")
    assert saved.build() is asked.pop("saved")
    assert kept == asked
    with pytest.raises(CheckpointingException, match="extra state is refused: .*getpid"):
        saved.merge_fn(torch.frombuffer(bytearray(pickle.dumps(os.getpid)), dtype=torch.uint8))


def test_a_hybrid_models_own_checkpoint_is_loaded_as_it_is():
    model = MimoModel.__new__(MimoModel)
    hybrid = SimpleNamespace(hybrid_layer_pattern="M*")
    assert _maybe_setup_gpt_to_hybrid_load(hybrid, hybrid, [model]) == (None, False)
