# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tied embeddings in checkpoints of a model whose groups are explicit."""

from types import SimpleNamespace

import torch

from megatron.core.models.common.language_module import language_module


def test_the_replica_is_the_rank_in_the_group_of_the_metadata(monkeypatch):
    monkeypatch.setattr(language_module, "make_tp_sharded_tensor_for_checkpoint", lambda **k: k)
    stage = SimpleNamespace(
        post_process=True,
        pre_process=False,
        shared_embedding_or_output_weight=lambda: torch.zeros(2, 2),
        tp_group=None,
    )
    state, metadata = {"output": None}, {"dp_cp_group": SimpleNamespace(rank=lambda: 5)}
    tie = language_module.LanguageModule.tie_embeddings_and_output_weights_state_dict
    tie(stage, state, "output", "embedding", metadata)
    assert state["output"]["replica_id"] == (1, 0, 5)
