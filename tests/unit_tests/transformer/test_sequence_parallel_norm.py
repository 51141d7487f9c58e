# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that the local specs' norms take from the config; gradients: rows.py."""

import pytest

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm


def norm_of(sequence_parallel: bool = False, **options) -> SequenceParallelNorm:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=1 + sequence_parallel,
        **options,
    )
    return SequenceParallelNorm(config, 64)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_parameters_carry_the_mark(sequence_parallel, normalization):
    norm = norm_of(sequence_parallel, normalization=normalization, layernorm_epsilon=0.25)
    assert all(p.sequence_parallel is sequence_parallel for p in norm.parameters())
    assert norm.eps == 0.25


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"normalization": "L2Norm"}, "L2Norm"),
        ({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True}, "zero_centered"),
    ],
)
def test_what_it_does_not_do_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        norm_of(**options)
