# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that the local specs' norms take from the config; gradients: test_hybrid_local_specs."""

import pytest

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm


class TestSequenceParallelNorm:
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
    def test_parameters_carry_the_mark(self, sequence_parallel, normalization):
        norm = SequenceParallelNorm(norm_config(sequence_parallel, normalization), 64)
        assert all(p.sequence_parallel is sequence_parallel for p in norm.parameters())

    def test_epsilon_comes_from_the_config(self):
        assert SequenceParallelNorm(norm_config(layernorm_epsilon=0.25), 64).eps == 0.25

    def test_unknown_normalization_is_refused(self):
        with pytest.raises(ValueError, match="L2Norm"):
            SequenceParallelNorm(norm_config(normalization="L2Norm"), 64)

    def test_zero_centered_weight_is_refused(self):
        with pytest.raises(ValueError, match="layernorm_zero_centered_gamma"):
            SequenceParallelNorm(norm_config(layernorm_zero_centered_gamma=True), 64)


def norm_config(
    sequence_parallel: bool = False, normalization: str = "RMSNorm", **options
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        normalization=normalization,
        use_cpu_initialization=True,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2 if sequence_parallel else 1,
        **options,
    )
