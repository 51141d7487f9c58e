# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of recurrent layers that are refused."""

from functools import partial

import pytest
import torch

from megatron.core.transformer import TransformerConfig

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
