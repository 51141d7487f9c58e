# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of two modules, finalized together: the same in every layout."""

import pytest

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.schedule.grad_finalization import finalize_mimo_grads
from tests.unit_tests.models.mimo.small_model import trained
from tests.unit_tests.test_utilities import requires_world_size


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
