# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of two modules, finalized together: the same in every layout."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.schedule import grad_finalization
from megatron.core.models.mimo.schedule.grad_finalization import finalize_mimo_grads
from tests.unit_tests.models.mimo.small_model import trained
from tests.unit_tests.test_utilities import Utils, requires_world_size


def gradients(encoder: dict[str, int], language: dict[str, int]) -> dict[str, float]:
    """Norms of the gradients that every rank has whole, by parameter."""
    with trained(encoder, language) as run:
        (batch,) = run.microbatches(1)
        run.model.zero_grad_buffer()
        losses, mask = run.model(**batch)
        (losses * mask).sum().backward()
        finalize_mimo_grads([run.model], mask.sum().int(), run.modules[LANGUAGE].groups)
        return {
            name: float(parameter.main_grad.norm())
            for name, parameter in run.model.named_parameters()
            if not getattr(parameter, "tensor_model_parallel", False)
        }


@requires_world_size(2)
def test_gradients_are_those_of_plain_data_parallelism():
    expected = gradients(dict(dp=2), dict(dp=2))
    assert min(expected.values()) > 1e-6 and len(expected) > 10
    for encoder, language in ((dict(dp=2), dict(tp=2)), (dict(tp=2), dict(dp=2))):
        assert gradients(encoder, language) == pytest.approx(expected, rel=1e-4)


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
