# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MimoModel whose language model is a hybrid, and a checkpoint of a hybrid run."""

from types import SimpleNamespace

from megatron.core.models.mimo.model.base import MimoModel
from megatron.training.checkpointing import _maybe_setup_gpt_to_hybrid_load


def test_its_own_checkpoint_is_loaded_as_it_is():
    model = MimoModel.__new__(MimoModel)
    args = SimpleNamespace(hybrid_layer_pattern="M*")
    saved = SimpleNamespace(hybrid_layer_pattern="M*")
    assert _maybe_setup_gpt_to_hybrid_load(args, saved, [model]) == (None, False)
