# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MimoModel loads its own checkpoints, whichever layers saved them."""

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import save

from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.extra_states import keep_unsaved_extra_states
from megatron.core.models.mimo.model.base import MimoModel
from megatron.training.checkpointing import _maybe_setup_gpt_to_hybrid_load


def test_only_an_extra_state_that_was_not_saved_is_the_modules_own(tmp_path):
    keys = ("saved._extra_state", "missing._extra_state", "missing.object")
    saved, missing, other = (ShardedObject(key, [key], (1,), (0,)) for key in keys)
    save({saved.unique_key: "scales"}, checkpoint_id=tmp_path, no_dist=True)
    save_config(CheckpointingConfig("torch_dist", 1), str(tmp_path))
    kept, own, same = keep_unsaved_extra_states([saved, missing, other], str(tmp_path))
    assert isinstance(own, LocalNonpersistentObject) and own.unwrap() is missing.data
    assert kept.build() is saved and same is other
    with pytest.raises(CheckpointingException, match="extra state is refused: .*getpid"):
        kept.merge_fn(torch.frombuffer(bytearray(pickle.dumps(os.getpid)), dtype=torch.uint8))


def test_a_hybrid_models_own_checkpoint_is_loaded_as_it_is():
    model = MimoModel.__new__(MimoModel)
    hybrid = SimpleNamespace(hybrid_layer_pattern="M*")
    assert _maybe_setup_gpt_to_hybrid_load(hybrid, hybrid, [model]) == (None, False)
