# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bias of an expert on an output that may not change in place."""

import pytest
import torch

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class _View(torch.autograd.Function):
    """Copies to no other rank, as tensor-parallel mappings of one rank."""

    @staticmethod
    def forward(ctx, rows):
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Linear(torch.nn.Linear):
    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs)

    def forward(self, rows):
        # A custom function's outputs that are views refuse to change.
        output = torch.nn.functional.linear(rows, self.weight)
        return _View.apply(output), self.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_expert_bias_is_added_to_a_view(dtype):
    """The router's weights are fp32, and the output has the dtype of the rows."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, use_cpu_initialization=True)
    group = torch.distributed.ProcessGroup(0, 1)
    mlp = MLP(config, MLPSubmodules(linear_fc1=_Linear, linear_fc2=_Linear), tp_group=group)
    mlp.to(dtype)
    rows, scale = torch.randn(5, 8, dtype=dtype), torch.rand(5)
    found, bias = mlp(rows, per_token_scale=scale)

    hidden = torch.nn.functional.gelu(torch.nn.Linear.forward(mlp.linear_fc1, rows))
    hidden = (hidden * scale[:, None]).to(dtype)
    expected = hidden @ mlp.linear_fc2.weight.t() + mlp.linear_fc2.bias * scale[:, None]
    assert bias is None
    assert found.dtype is dtype
    tolerance = 1e-6 if dtype is torch.float32 else 3e-2  # bf16 has 8 bits
    torch.testing.assert_close(found, expected.to(dtype), rtol=tolerance, atol=tolerance)
    found.sum().backward()
    assert mlp.linear_fc2.bias.grad is not None
