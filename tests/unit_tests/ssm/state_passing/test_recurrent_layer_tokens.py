# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of recurrent layers and groups of their tokens that are refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.core.ssm.state_passing.layer_tokens import LayerTokens
from megatron.core.transformer import TransformerConfig


def test_sequence_parallel_tokens_need_a_group_whose_tp_is_the_fastest():
    def group_of(size: int, rank: int = 0) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: size, rank=lambda: rank)

    config = SimpleNamespace(hidden_size=8, sequence_parallel=True)
    groups = SimpleNamespace(tp=group_of(2), cp=group_of(2), tp_cp=group_of(4, rank=1))
    with pytest.raises(ValueError, match="rank 0 of 4 here, found 1"):
        LayerTokens(config, groups)


CONTIGUOUS = {"attention_cp_layout": "contiguous"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"linear_cp_mode": "ring"}, "linear_cp_mode must be one of"),
        ({"linear_cp_layout": "striped"}, "linear_cp_layout must be one of"),
        ({"linear_cp_layout": "contiguous"}, "needs linear_cp_mode='chunkwise'"),
        ({"attention_cp_layout": "striped"}, "attention_cp_layout must be one of"),
        (CONTIGUOUS | {"context_parallel_size": 2}, "'contiguous' takes one CP rank"),
        (
            {"mamba_training_ssm_states_dtype": torch.float32, "linear_cp_mode": "chunkwise"},
            "takes no mamba_training_ssm_states_dtype",
        ),
    ],
)
def test_what_is_no_option_or_does_not_go_together_is_refused(options, message):
    config_of = partial(TransformerConfig, num_layers=1, hidden_size=8, num_attention_heads=1)
    config_of(**CONTIGUOUS)  # on one rank
    with pytest.raises(ValueError, match=message):
        config_of(**options)
