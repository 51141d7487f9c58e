# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that the norms of the local specs refuse; what they compute is in rows.py."""

import pytest

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"normalization": "L2Norm"}, "L2Norm"),
        ({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True}, "zero_centered"),
    ],
)
def test_what_it_does_not_do_is_refused(options, named):
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **options)
    with pytest.raises(ValueError, match=named):
        SequenceParallelNorm(config, 64)
