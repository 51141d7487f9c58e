# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bias of an expert is added to an output that may not change in place."""

import pytest
import torch

from megatron.core.tensor_parallel.mappings import _ReduceFromModelParallelRegion
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

ALONE = torch.distributed.ProcessGroup(0, 1)


class _Linear(torch.nn.Linear):
    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs)

    def forward(self, rows):
        rows = rows @ self.weight.t()
        return _ReduceFromModelParallelRegion.apply(rows, ALONE), self.bias


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_an_expert_bias_is_added_to_a_view(dtype, tolerance):
    """The router's weights are fp32; the output has the dtype of the rows. bf16 has 8 bits."""
    sizes = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 32, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, use_cpu_initialization=True)
    mlp = MLP(config, MLPSubmodules(linear_fc1=_Linear, linear_fc2=_Linear), tp_group=ALONE)
    mlp.to(dtype)
    rows, scale = torch.randn(5, 8, dtype=dtype), torch.rand(5)
    output, bias = mlp(rows, per_token_scale=scale)
    assert bias is None and output.dtype is dtype
    hidden = torch.nn.functional.gelu(torch.nn.Linear.forward(mlp.linear_fc1, rows))
    expected = torch.nn.Linear.forward(mlp.linear_fc2, hidden) * scale[:, None]
    torch.testing.assert_close(output, expected.to(dtype), rtol=tolerance, atol=tolerance)
    output.sum().backward()
    assert mlp.linear_fc2.bias.grad is not None
