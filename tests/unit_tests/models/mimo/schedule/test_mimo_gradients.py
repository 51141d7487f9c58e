# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients are divided by a number; their sums are in test_mimo_three_phases.py."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.mimo.schedule import grad_finalization
from tests.unit_tests.test_utilities import Utils, requires_world_size


@requires_world_size(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_every_type_are_divided(dtype, monkeypatch):
    """One kernel divides bf16 gradients, and another the other types. A count such as 347 has
    no bf16 inverse: bf16 gradients are multiplied by the number in fp32, and rounded once."""
    monkeypatch.setattr(grad_finalization, "AT_A_TIME", 100)
    given = torch.randn(999, generator=torch.Generator().manual_seed(5)).to(Utils.device)
    buffers = [
        SimpleNamespace(grad_data=given.to(dtype, copy=True), extra_main_grads=[given.clone()])
        for _ in range(2)
    ]
    stage = SimpleNamespace(buffers=buffers[:1], expert_parallel_buffers=buffers[1:])
    grad_finalization._scale_gradients(stage, 1.0 / torch.tensor(347, device=Utils.device))
    for buffer in buffers:
        for found in (buffer.grad_data, *buffer.extra_main_grads):
            expected = (given.to(found.dtype).double() / 347).to(found.dtype)
            most = 0 if found.dtype is torch.bfloat16 else 2 * torch.finfo(found.dtype).eps
            torch.testing.assert_close(found, expected, rtol=most, atol=0)
